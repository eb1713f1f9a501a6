"""`python -m benchmarks.first_hour`: the page is taken apart, and a section that fails is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import first_hour

PAGE = """# A page

## Prose only

## One and two

```python
# made/hello.py
print("hello")
```

```bash
python3 made/hello.py
export LEFT=1
```

```bash
test "$LEFT" = 1
```

## Not so good

```bash
false | true
echo never
```
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    monkeypatch.setattr(first_hour, "FOLDER", tmp_path / "runs")
    return tmp_path


def test_sections_are_run_in_a_shell_each(root: Path) -> None:
    good, bad = first_hour.sections(PAGE)
    assert (good.title, bad.title) == ("One and two", "Not so good")
    assert first_hour.run(good)["code"] == 0
    assert "hello" in (root / "runs/one_and_two.log").read_text()
    row = first_hour.run(bad)
    assert row["code"] == 1
    assert "\nnever" not in (root / "runs/not_so_good.log").read_text()


def test_what_hangs_is_ended(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_hour, "LIMIT_S", 0.2)
    (section,) = first_hour.sections("## Hangs\n\n```bash\nsleep 60 &\nwait\n```\n")
    row = first_hour.run(section)
    assert row["code"] == 124
    assert row["seconds"] < 30


def test_page() -> None:
    """Each file that the page's commands read from its folder is a block of the page or made by one."""
    found = list(first_hour.sections(first_hour.PAGE.read_text()))
    assert found[0].title == "Install"
    files = {path for section in found for path in section.files}
    assert {"runs/first_hour/letters.py", "runs/first_hour/letters.yaml"} <= files
    rows = [{"section": "Install", "seconds": 61.0, "code": 0}]
    assert "| Install | 61 |" in first_hour.table(rows)
    result = {"rows": rows, "machine": "a machine", "date": "2026-12-01"}
    (text,) = first_hour.pages("first_hour", result).values()
    assert "On a machine, 2026-12-01." in text
