"""Rows of metrics.jsonl that are missing or damaged when a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.run.metric_rows import COPY, find_damage, mend, rows_before
from parallel.checkpoint.manifest import record, write_manifest

STEPS = 6


def line(step: int, value: float = 0.5) -> bytes:
    return json.dumps({"step": step, "reward/mean": value}).encode() + b"\n"


ROWS = [line(step) for step in range(STEPS)]


def make(run: Path, *, copy: bool = True) -> tuple[Path, Path]:
    """A run of six steps and its checkpoint of the fourth."""
    metrics, saved = run / "metrics.jsonl", run / "checkpoints/iter_0000004"
    saved.mkdir(parents=True)
    metrics.write_bytes(b"".join(ROWS))
    if copy:
        (saved / COPY).write_bytes(rows_before(metrics, 4))
    files = {name: record(saved / name) for name in ([COPY] if copy else [])}
    write_manifest(saved, {"step": 4}, files)
    return metrics, saved


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS, ""),
        (ROWS[:4], ""),
        (ROWS[:1], "the rows of steps 1 to 3 are missing"),
        ([], "the rows of steps 0 to 3 are missing"),
        (
            [*ROWS[:2], ROWS[2][:9] + b"\n", *ROWS[3:]],
            "the row of step 2 is missing, 1 line(s) cannot",
        ),
        ([ROWS[0], b"\xff\n", *ROWS[2:3]], "the rows of steps 1, 3 are missing"),
        ([*ROWS[:3], line(3, 0.9), *ROWS[4:]], "the row of step 3 is changed since the checkpoint"),
        ([ROWS[1], ROWS[0], *ROWS[2:]], "the rows are in another order"),
        ([b"[3]\n", *ROWS], "the rows are in another order"),
    ],
)
def test_what_is_wrong_is_named_and_mended(rows: list[bytes], said: str, tmp_path: Path) -> None:
    metrics, saved = make(tmp_path)
    metrics.write_bytes(b"".join(rows))
    found = find_damage(metrics, saved, 4)
    assert found.startswith(f"{metrics}: {said}") if said else found == ""
    mend(metrics, saved, 4)
    assert RunFolder(tmp_path).read_metrics()[:4] == [json.loads(row) for row in ROWS[:4]]
    assert metrics.read_bytes().endswith(ROWS[-1]) == (ROWS[-1] in rows)  # later rows stay
    aside = tmp_path / "metrics.jsonl.damaged"
    assert (aside.read_bytes() == b"".join(rows)) if said else not aside.exists()
    assert find_damage(metrics, saved, 4) == ""


def test_a_file_that_is_gone_is_rebuilt(tmp_path: Path) -> None:
    metrics, saved = make(tmp_path)
    metrics.unlink()
    assert "the rows of steps 0 to 3 are missing" in find_damage(metrics, saved, 4)
    mend(metrics, saved, 4)
    assert metrics.read_bytes() == b"".join(ROWS[:4])


@pytest.mark.parametrize("way", ["none", "damaged"])
def test_without_a_copy_it_is_refused(way: str, tmp_path: Path) -> None:
    metrics, saved = make(tmp_path, copy=way == "damaged")
    if way == "damaged":
        (saved / COPY).write_bytes(b"".join(ROWS[:2]) + b"x" * (len(ROWS[0]) * 2))
    assert find_damage(metrics, saved, 4) == ""  # nothing is missed
    metrics.write_bytes(b"".join(ROWS[:2]))
    with pytest.raises(InputError, match=r"steps 2 to 3 are missing, and .*no copy") as caught:
        find_damage(metrics, saved, 4)
    assert "\n" not in str(caught.value)


def test_a_damaged_line_is_named_by_whoever_reads_it(tmp_path: Path) -> None:
    metrics, _ = make(tmp_path)
    metrics.write_bytes(ROWS[0] + b"{oops\n" + ROWS[2])
    said = r"metrics.jsonl:2: the line is damaged \(it is not JSON\); `mrl train"
    with pytest.raises(InputError, match=said):
        RunFolder(tmp_path).read_metrics()
    assert RunFolder(tmp_path).has_begun
    (tmp_path / "history.jsonl").write_text('{"step": \n')
    with pytest.raises(InputError, match=r"history.jsonl:1: the line is damaged"):
        RunFolder(tmp_path).history.read()
