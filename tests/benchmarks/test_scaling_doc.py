"""docs/scaling.md is what benchmarks/scaling.py writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import scaling


def test_the_committed_document_is_the_scripts_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scaling.md"
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--output", str(output)])
    with pytest.raises(SystemExit) as end:
        scaling.main()
    assert end.value.code == 0, capsys.readouterr().out
    written = output.read_text()
    assert "{" not in written  # everything was filled in
    committed = (scaling.ROOT / "docs" / "scaling.md").read_text()
    assert written == committed, "run benchmarks/scaling.py"
