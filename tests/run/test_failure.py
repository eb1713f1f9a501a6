"""The record of a failure and the block that shows it."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.errors import MEANINGS, ExitCode
from mrl.jobs.report import reporting
from mrl.run.failure import (
    Failure,
    clear_failure,
    newest_snapshot,
    newest_step,
    print_failure,
    read_failure,
    tail_of,
    write_failure,
)
from parallel.checkpoint.snapshot_note import Note, write_note
from tests.loop.conftest import TOY_RECIPE

LOST = Failure("rank 1 was killed by SIGKILL", ExitCode.LOST_RANK, rank=1, host="node2", time=1.0)


def test_the_record_that_says_most_stays(tmp_path: Path) -> None:
    echo = Failure("Connection closed by peer", ExitCode.UNFORESEEN, rank=0)
    disk = Failure("the disk is full", ExitCode.DISK, rank=1)
    assert write_failure(tmp_path, echo) == echo
    assert write_failure(tmp_path, LOST) == LOST
    assert write_failure(tmp_path, disk) == disk
    assert write_failure(tmp_path, LOST) == disk
    assert write_failure(tmp_path, echo) == disk
    assert read_failure(tmp_path) == disk
    assert [file.name for file in tmp_path.iterdir()] == ["failure.json"]


@pytest.mark.parametrize("code", [ExitCode.UNFORESEEN, ExitCode.FAILED])
def test_what_a_rank_says_of_itself_stays_when_others_lose_it(code: int, tmp_path: Path) -> None:
    """The others are ranks of this node or another one, the monitor, and the launcher."""
    cause = Failure("ValueError: of rank 1", code, rank=1)
    echo = Failure("lost the connection", ExitCode.LOST_RANK, rank=0, is_echo=True)
    write_failure(tmp_path, cause)
    assert write_failure(tmp_path, echo) == cause
    assert write_failure(tmp_path, LOST) == cause
    disk = Failure("the disk is full", ExitCode.DISK, rank=0)
    assert write_failure(tmp_path, disk) == disk


def test_an_echo_is_replaced_by_the_rank_that_was_lost_and_by_no_other_echo(tmp_path: Path) -> None:
    echo = Failure("lost the connection", ExitCode.LOST_RANK, rank=0, is_echo=True)
    other = Failure("RuntimeError: closed", ExitCode.UNFORESEEN, rank=2)
    assert write_failure(tmp_path, echo) == echo
    assert write_failure(tmp_path, other) == echo
    assert write_failure(tmp_path, LOST) == LOST


def test_a_later_start_moves_the_record_to_the_earlier_ones(tmp_path: Path) -> None:
    clear_failure(tmp_path)  # none is there
    clear_failure(tmp_path / "new")
    for _ in range(2):
        write_failure(tmp_path, LOST)
        clear_failure(tmp_path)
    assert read_failure(tmp_path) is None
    rows = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert [json.loads(row)["what"] for row in rows] == [LOST.what] * 2


def test_a_damaged_record_is_none_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"what": ')
    assert read_failure(tmp_path) is None
    assert write_failure(tmp_path, LOST) == LOST


def test_the_block_says_where_and_what_to_do_and_hides_control_codes(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {n}\n" for n in range(9000)) + "\x1b[31mred\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    stream = io.StringIO()
    failure = Failure(
        "an engine was lost", ExitCode.LOST_ENGINE, rank=3, host="node2", phase="rollout", step=5,
        since_s=61.0, log=str(log), log_tail=tail_of(log, 2), saved_step=newest_step(tmp_path),
        command="mrl train runs/a/config.yaml",
    )  # fmt: skip
    print_failure(failure, stream)
    assert stream.getvalue().splitlines() == [
        "mrl: an engine was lost",
        "  where     rank 3, host node2, phase rollout, step 5",
        "  since     61.0 s before this report",
        f"  log       {log}, which ends with",
        "            | line 8999",
        "            | \\x1b[31mred",
        "  saved     a checkpoint with 4 steps done",
        f"  exit code 73: {MEANINGS[ExitCode.LOST_ENGINE]}",
        "  next      mrl train runs/a/config.yaml",
    ]


def test_a_newer_snapshot_is_named(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()

    def saved() -> str:
        steps = newest_step(tmp_path), newest_snapshot(tmp_path)
        stream = io.StringIO()
        failure = Failure("x", 70, saved_step=steps[0], snapshot_step=steps[1])
        print_failure(failure, stream)
        return next(line for line in stream.getvalue().splitlines() if " saved " in line)

    assert saved() == "  saved     no checkpoint; the next start begins with step 0"
    write_note(checkpoints, Note(5, "0" * 64, None, [{"host": "a", "folder": "b"}]))
    assert saved() == "  saved     no checkpoint, and a snapshot on the nodes with 5 steps done"
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    write_note(checkpoints, Note(5, "0" * 64, 4, [{"host": "a", "folder": "b"}]))
    assert saved().endswith(
        "a checkpoint with 4 steps done, and a snapshot on the nodes with 5 steps done"
    )
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("6")
    assert saved() == "  saved     a checkpoint with 6 steps done"


def test_the_record_of_a_run_whose_output_was_closed_has_the_exit_code_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    error = BrokenPipeError(errno.EPIPE, "the reader of standard output has closed the pipe")
    for code in (ExitCode.UNFORESEEN, ExitCode.BROKEN_PIPE):
        with open(write, "w", closefd=False) as stdout, monkeypatch.context() as patched:
            patched.setattr("sys.stdout", stdout)
            with (
                pytest.raises(BrokenPipeError),
                reporting(tmp_path, "mrl train run", lambda error: None, lambda: 3),
            ):
                raise error
        found = read_failure(tmp_path)
        assert found is not None
        assert found.exit_code == code
        del vars(error)["__mrl_failure__"]
        if code == ExitCode.UNFORESEEN:  # the pipe is still open: another one broke
            os.close(read)
    os.close(write)


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(ExitCode)


def test_the_page_prints_the_table_of_exit_codes() -> None:
    page = (Path(__file__).parents[2] / "docs/faults.md").read_text()
    table = page.split("## Exit codes\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        f"| {int(code)} | {code.name.lower().replace('_', ' ')} | {MEANINGS[code]} |"
        for code in sorted(MEANINGS)
    ]


def test_ctrl_c_says_what_is_saved_and_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mrl.jobs.train.train", interrupted)
    monkeypatch.chdir(tmp_path)
    words = ["train", str(TOY_RECIPE), "output_dir=run"]

    def said() -> str:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == ExitCode.INTERRUPTED
        return capsys.readouterr().err

    assert said() == "mrl: interrupted; start again to continue from the last checkpoint\n"
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").touch()
    then = "train run/config.yaml\n"
    assert said().startswith(
        "mrl: interrupted; saved: no checkpoint; the next start begins with step 0; "
    )
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    line = said()
    assert line.startswith(
        "mrl: interrupted; saved: a checkpoint with 4 steps done; continue with: "
    )
    assert line.endswith(then)
