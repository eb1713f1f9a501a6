"""`make evidence`: its catalog fits the repository, and stale results are marked as such."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest

from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence import record as records
from benchmarks.evidence import result as results
from benchmarks.evidence import staleness
from benchmarks.evidence.catalog import BY_NAME, TARGETS, chosen, target_of
from benchmarks.evidence.digest import ROOT, definitions, digest, matches, measured_files
from benchmarks.evidence.staleness import PAGE, RESULTS, files_at, marked, states

MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_target_can_be_started(target, monkeypatch, capsys) -> None:
    """A renamed module or function that a benchmark imports is found here, in `make test`."""
    module = importlib.import_module(target.arguments[0])
    monkeypatch.setattr(sys, "argv", [target.name, "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert "usage:" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [target.name, *target.arguments[1:], "--no-such-option"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_target_measures_files_that_exist(target) -> None:
    for pattern in target.measures:
        assert measured_files([pattern]), f"{target.name}: {pattern} names no file"
    own = target.arguments[0].replace(".", "/") + ".py"
    assert any(matches(own, pattern) for pattern in target.measures)
    assert not target.short or (ROOT / target.short).exists()


def test_every_makefile_target_of_evidence_is_in_the_catalog() -> None:
    recipes = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.M)
    started = {
        name: re.findall(r"-m ((?:benchmarks|studies)\.[\w.]+)", lines) for name, lines in recipes
    }
    assert started.pop("evidence") == ["benchmarks.evidence"]
    assert started.pop("compat") == ["benchmarks.compat"]  # reads other releases, measures nothing
    for name, modules in started.items():
        if modules:
            assert [t.arguments[0] for t in chosen([name])] == modules
    assert "gpu-check" in BY_NAME


def test_every_result_has_a_target_and_names_its_commit() -> None:
    named = {name for target in TARGETS for name in target.results}
    on_file = {file.stem for file in RESULTS.glob("*.json")}
    on_gpu = {name for name in on_file if name.startswith(("gpu_check", "kernels_cuda"))}
    assert on_file - on_gpu == named & on_file
    for target in TARGETS:
        assert not target.results or target.results[0] in on_file
    for name in named & on_file:
        found = json.loads((RESULTS / f"{name}.json").read_text())
        assert re.fullmatch(r"[0-9a-f]{40}(\+dirty)?", found["commit"]), name


def test_the_page_says_which_results_are_stale() -> None:
    page = PAGE.read_text()
    assert marked(page, states()) == page, (
        "code that a result measures has changed, or a result was made anew: repeat the measurement "
        "(python -m benchmarks.evidence --only NAME), or let `python -m benchmarks.evidence --mark` "
        "write into docs/results.md that its figures are of older code"
    )


def test_the_page_quotes_the_counts_on_file() -> None:
    num_compared = 0
    for line in PAGE.read_text().splitlines():
        counts = re.search(r"\b(\d+) passed, (\d+) failed", line)
        for name in re.findall(r"`(\w+)\.json`", line) if counts else []:
            found = json.loads((RESULTS / f"{name}.json").read_text())
            if "passed" in found:
                assert [str(found["passed"]), str(found["failed"])] == list(counts.groups()), name
                num_compared += 1
    assert num_compared >= 2


@pytest.mark.release
def test_a_result_was_made_with_the_code_of_its_commit() -> None:
    """Nothing can be compared where a result has no digest, or no commit holds its code."""
    missing = []
    for name in sorted({name for target in TARGETS for name in target.results}):
        file = RESULTS / f"{name}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        if "digest" not in found or found["commit"].endswith("+dirty"):
            continue
        files = files_at(found["commit"], found["measures"])
        if files is None:
            missing.append(f"{name}.json ({found['commit'][:7]})")
        else:
            assert digest(files) == found["digest"], name
    if missing:
        pytest.skip(f"this clone does not have the commits of {', '.join(missing)}")


BEFORE = '''"""Text."""
import os
LIMIT = 1
HERE = Path(__file__).parents[1]


def size(n):
    """A docstring."""
    if n < 0:
        raise ValueError("negative")
    return LIMIT * n  # a comment
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Text."""', '"""Other text."""'),
        ('    """A docstring."""\n', ""),
        ("import os", "import sys"),
        ("parents[1]", "parents[2]"),
        ("negative", "below 0"),
        ("  # a comment", ""),
        ("LIMIT = 1", "LIMIT   =  1"),
    ],
)
def test_what_cannot_change_a_measurement_leaves_the_digest(old, new) -> None:
    after = BEFORE.replace(old, new)
    assert after != BEFORE
    assert digest({"a.py": BEFORE.encode()}) == digest({"a.py": after.encode()})


@pytest.mark.parametrize(
    ("old", "new"), [("LIMIT = 1", "LIMIT = 2"), ("n < 0", "n <= 0"), ("ValueError", "TypeError")]
)
def test_changed_code_changes_the_digest(old, new) -> None:
    after = BEFORE.replace(old, new)
    assert digest({"a.py": BEFORE.encode()}) != digest({"a.py": after.encode()})


def test_a_definition_may_move_to_another_file() -> None:
    top, function = BEFORE.split("\n\n\ndef ")
    parts = {"b/c.py": top.encode(), "d.py": b"def " + function.encode()}
    assert digest(parts) == digest({"a.py": BEFORE.encode()})
    assert digest({"b/c.py": parts["b/c.py"]}) != digest(parts)


@pytest.mark.parametrize(
    ("name", "old", "new", "is_same"),
    [
        ("a.h", "int f(); // one", "int  f();\n/* two */", True),
        ("a.h", '#include "a.h"\nint f();', '#include "b.h"\nint f();', True),
        ("a.h", 'auto s = "//a";', 'auto s = "//b";', False),
        ("a.yaml", "a: 1  # one\nb: 2", "b: 2\na: 1", True),
        ("a.yaml", "a: 1", "a: 2", False),
    ],
)
def test_other_files_count_by_what_they_mean(name, old, new, is_same) -> None:
    assert (definitions(name, old.encode()) == definitions(name, new.encode())) is is_same


@pytest.mark.parametrize(
    ("path", "pattern", "is_named"),
    [
        ("mrl/collect/base.py", "mrl/collect", True),
        ("mrl/collector/base.py", "mrl/collect", False),
        ("parallel/export.py", "parallel/*.py", True),
        ("parallel/layers/experts.py", "parallel/*.py", False),
        ("mrl/_C.so", "mrl", False),
    ],
)
def test_patterns(path, pattern, is_named) -> None:
    assert matches(path, pattern) is is_named


def test_a_result_becomes_stale_when_its_code_changes(tmp_path, monkeypatch) -> None:
    target = replace(BY_NAME["route_wire"], measures=("parallel/mesh.py",))
    source = tmp_path / "parallel" / "mesh.py"
    source.parent.mkdir()
    source.write_text(BEFORE)
    monkeypatch.setattr(staleness, "TARGETS", [target])
    found = {"commit": "0" * 40, "date": "2026-01-02", "measures": list(target.measures)}
    file = tmp_path / "route_wire.json"

    def why() -> str:
        file.write_text(json.dumps(found))
        (state,) = states(tmp_path, tmp_path)
        return state.why

    assert why() == "recorded before digests were kept"
    found["digest"] = digest({"a.py": BEFORE.encode()})
    assert why() == ""
    source.write_text(BEFORE.replace("LIMIT = 1", "LIMIT = 2"))
    assert why() == "changed since"
    source.write_text(BEFORE)
    found["measures"] = ["parallel"]
    assert why() == "the catalog names other files now"
    monkeypatch.setattr(staleness, "TARGETS", [replace(target, arguments=("studies.one",))])
    assert why() == ""
    own = staleness.tables(states(tmp_path, tmp_path))
    assert ["route_wire.json" in own[name] for name in ("studies", "how current")] == [True, False]


def test_studies_run_only_by_name() -> None:
    assert not any(target.is_study for target in chosen([]))
    assert [target.is_study for target in chosen(["stability"])] == [True]


def test_a_result_says_where_it_comes_from(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        results, "git", lambda *command: {"rev-parse": b"c0ffee\n"}.get(command[0], b"")
    )
    file = tmp_path / "own.json"
    returned = results.write_result("route_wire", {"a": 1}, passed=2, failed=0, path=file)
    assert returned == (written := json.loads(file.read_text()))
    assert written["commit"].removesuffix("+dirty") == "c0ffee"
    assert written["digest"] == digest(measured_files(BY_NAME["route_wire"].measures))
    assert (written["passed"], written["failed"], written["a"]) == (2, 0, 1)
    assert "missed" not in written
    slow = results.write_result("route_wire", {}, passed=2, failed=0, missed=2, path=file)
    assert slow["missed"] == 2
    monkeypatch.setattr(
        results, "git", lambda *command: b"c0ffee\n" if command[0] == "rev-parse" else b"M"
    )
    assert results.commit_now([]) == "c0ffee+dirty"
    monkeypatch.setattr(results, "git", lambda *command: None)
    assert results.commit_now([]) == "unknown"
    with pytest.raises(KeyError, match="writes nothing"):
        target_of("nothing")


CHILDREN = {
    "good": "print('3 passed, 0 failed')",
    "slow": "print('3 passed, 0 failed, 1 goal missed')",
    "bad": "print('2 passed, 1 failed'); raise SystemExit(1)",
    "silent": "pass",
    "lies": "print('3 passed, 0 failed'); raise SystemExit(3)",
    "hangs": "import subprocess, time; subprocess.Popen(['sleep', '100']); time.sleep(100)",
}


def test_a_target_that_fails_stops_no_other(tmp_path, monkeypatch, capsys) -> None:
    for name, code in CHILDREN.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(evidence, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(evidence, "has_gpu", lambda: False)
    blank = replace(BY_NAME["route_wire"], minutes=0)
    targets = [replace(blank, name=name, arguments=(name,)) for name in CHILDREN]
    targets[-1] = replace(targets[-1], minutes=-1.99)  # a limit of 3 s
    targets.append(replace(blank, name="gpu", needs_gpu=True))
    with pytest.raises(SystemExit) as left:
        evidence.run_all(targets)
    assert left.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 4 failed"
    start = next(n for n, line in enumerate(lines) if line.startswith("target "))
    found = {line.split()[0]: re.split(r"\s{2,}", line)[1:4] for line in lines[start + 1 : -1]}
    assert {name: (row[0], row[2]) for name, row in found.items()} == {
        "good": ("passed", "3 passed, 0 failed"),
        "slow": ("passed", "3 passed, 0 failed, 1 goal missed"),
        "bad": ("failed", "2 passed, 1 failed"),
        "silent": ("failed", "no plain line; exit code 0"),
        "lies": ("failed", "3 passed, 0 failed, but exit code 3"),
        "hangs": ("failed", "ended at its limit of 3 s"),
        "gpu": ("skipped", "needs a GPU"),
    }


def test_a_new_result_becomes_the_committed_one(tmp_path, monkeypatch) -> None:
    new, committed, page = tmp_path / "new", tmp_path / "committed", tmp_path / "results.md"
    shutil.copytree(RESULTS, committed)
    monkeypatch.setattr(records, "PAGE", page)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    page.write_text(PAGE.read_text())
    targets = [BY_NAME["layouts"], BY_NAME["route_wire"]]
    assert records.record(targets, new, committed) == records.Recorded()
    result = json.loads((RESULTS / "layouts.json").read_text())
    result |= {"passed": 987, "failed": 6, "missed": 2, "date": "2031-05-06"}
    new.mkdir()
    (new / "layouts.json").write_text(json.dumps(result))
    layouts = tmp_path / "layouts.md"
    monkeypatch.setattr(importlib.import_module("benchmarks.layouts"), "DOCUMENT", layouts)
    (line,) = records.record(targets, new, committed).lines
    assert line.startswith("layouts: recorded, and written into layouts.md, results.md")
    assert json.loads((committed / "layouts.json").read_text()) == result
    assert "987" in layouts.read_text()
    rows = [row for row in page.read_text().splitlines() if "`layouts.json`" in row]
    assert len(rows) == 2
    assert all("987 passed, 6 failed, 2 goals missed" in row for row in rows)
    assert "2031-05-06" in rows[1]


def test_a_target_is_current_where_its_results_passed_with_this_code(tmp_path, monkeypatch) -> None:
    target = BY_NAME["route_wire"]
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "none")
    monkeypatch.setattr(evidence, "NEW", tmp_path)
    file = tmp_path / "route_wire.json"
    assert not evidence.is_current(target)
    result = {
        **{"commit": "0" * 40, "date": "2026-01-02", "passed": 1, "failed": 0},
        **{"measures": list(target.measures), "digest": digest(measured_files(target.measures))},
    }
    for change in ({}, {"failed": 1}, {"digest": "0"}, {"commit": "0" * 40 + "+dirty"}):
        file.write_text(json.dumps({**result, **change}))
        assert evidence.is_current(target) == (not change)
    assert not evidence.is_current(BY_NAME["gpu-check"])  # has no result to go by
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "committed")
    (tmp_path / "committed").mkdir()
    (tmp_path / "committed" / file.name).write_text(json.dumps(result))
    for change in ({}, {"failed": 1}, {"digest": "0"}):  # an old new one hides no committed one
        file.write_text(json.dumps({**result, **change}))
        assert evidence.is_current(target) == ("failed" not in change)


def test_unknown_names_are_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence", "--only", "layout"])
    with pytest.raises(SystemExit) as left:
        evidence.main()
    assert left.value.code == 2
    assert (
        "--only: got layout; expected some of agent_runs, async, bench, collapse"
        in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="got x;"):
        chosen(["x", "layouts"])
    assert [target.name for target in chosen(["rollout-bench", "layouts"])] == [
        *("layouts", "throughput", "weight_sync", "route_wire", "replay_overhead")
    ]


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"docs/results\.md: expected the lines"):
        marked("no markers", [])
    with pytest.raises(ValueError, match="<!-- studies -->"):
        marked("<!-- how current --><!-- /how current -->", [])
