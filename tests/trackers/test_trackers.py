"""Trackers get every step once, whatever fails: with trackers made for the test, and no package."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config import LoggingConfig, Recipe, load_recipe
from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.trackers import Trackers, check_trackers, follower
from mrl.trackers.base import Run, Started

REPOSITORY = Path(__file__).parents[2]


class Memory:
    """A tracker that keeps what it gets. `do` is called before each step arrives, and may raise."""

    do: Callable[[int], None]
    steps: dict[int, dict]
    samples: dict[int, list]
    starts: list[tuple[str | None, int]]
    closed: list[bool]

    def __init__(self, run: Run) -> None:
        self.run = run

    @staticmethod
    def packages(config: LoggingConfig) -> tuple[str, ...]:
        return ()

    def start(self, run_id: str | None, next_step: int) -> Started:
        self.starts.append((run_id, next_step))
        for step in [step for step in self.steps if step >= next_step]:
            del self.steps[step]
        return Started(run_id or "the id", next_step)

    def log(self, step, metrics, time_s) -> None:
        type(self).do(step)
        assert step not in self.steps
        self.steps[step] = {"step": step, **metrics}

    def log_samples(self, step, rows, time_s) -> None:
        self.samples[step] = rows

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def memory(monkeypatch):
    fresh = type("Fresh", (Memory,), {
        "do": staticmethod(lambda step: None), "steps": {}, "samples": {}, "starts": [], "closed": [],
    })  # fmt: skip
    monkeypatch.setattr("mrl.trackers.trackers.load_tracker", lambda name: fresh)
    monkeypatch.setattr(follower, "RETRY_S", 0.0)
    return fresh


def recipe(tmp_path: Path, *more: str) -> Recipe:
    (tmp_path / "run/rollouts").mkdir(parents=True, exist_ok=True)  # as an open run folder has it
    given = [f"output_dir={tmp_path / 'run'}", "logging=[jsonl,memory]", *more]
    return load_recipe(REPOSITORY / "launch/recipes/toy_moe.yaml", given)


def add(folder: RunFolder, *steps: int, value: float = 1.0) -> None:
    folder.rollouts.mkdir(parents=True, exist_ok=True)
    for step in steps:
        rows = [{"prompt": "p", "completion": str(i), "reward": i, "more": 1} for i in range(8)]
        folder.write_rollouts(step, [(json.dumps(row) + "\n").encode() for row in rows])
        folder.add_metrics({"step": step, "loss": value + step, "none": float("nan")})


def test_damaged_samples_are_left_out_and_the_steps_arrive(tmp_path, memory):
    """No other try would mend them."""
    told, of_run = [], recipe(tmp_path)
    folder = RunFolder(of_run.output_dir)
    add(folder, 0, 1, 2)
    folder.rollout_file(1).write_text("{oops\n")
    trackers = Trackers(of_run, folder, is_main=True, warn=told.append)
    trackers.start(0)
    trackers.follow()
    trackers.close(failed=False)
    assert sorted(memory.steps) == [0, 1, 2]
    (said,) = told
    assert (
        f"memory gets no samples of step 1: {folder.rollout_file(1)}:1: the line is damaged" in said
    )


@pytest.mark.parametrize("text", ["[]", "{oops", '{"memory": 3}', '{"memory": {"next_step": "x"}}'])
def test_a_damaged_state_begins_new_runs(text, tmp_path, memory):
    told, folder = [], RunFolder(recipe(tmp_path).output_dir)
    (folder.root / "trackers.json").write_text(text)
    trackers = Trackers(recipe(tmp_path), folder, warn=told.append)
    trackers.start(0)
    trackers.close(failed=False)
    assert "trackers.json cannot be read" in told[0]


def test_every_step_arrives_with_some_samples(tmp_path, memory):
    folder, warned = RunFolder(tmp_path / "run"), []
    trackers = Trackers(recipe(tmp_path, "logging.samples_every=2"), folder, warn=warned.append)
    trackers.start(0)
    for step in range(5):
        add(folder, step)
        trackers.follow()
    trackers.close(failed=False)
    assert list(memory.steps.values()) == [{"step": s, "loss": 1.0 + s} for s in range(5)]
    assert list(memory.samples) == [0, 2, 4]
    assert [row["completion"] for row in memory.samples[0]] == ["0", "2", "4", "6"]
    assert memory.closed == [False]
    assert not warned
    state = json.loads((folder.root / "trackers.json").read_text())
    assert state["memory"] == {"run_id": "the id", "next_step": 5}


def test_a_resume_keeps_the_id_and_replaces_the_steps_that_it_repeats(tmp_path, memory):
    folder = RunFolder(tmp_path / "run")
    first = Trackers(recipe(tmp_path), folder)
    first.start(0)
    add(folder, 0, 1, 2, 3)
    first.close(failed=True)
    folder.rewind(2)
    second = Trackers(recipe(tmp_path), folder)
    second.start(2)
    add(folder, 2, 3, 4, value=10.0)
    second.close(failed=False)
    assert memory.starts == [(None, 0), ("the id", 2)]
    rows = [{k: v for k, v in row.items() if v is not None} for row in folder.read_metrics()]
    assert list(memory.steps.values()) == rows
    assert memory.closed == [True, False]


def test_a_tracker_that_was_behind_or_is_new_catches_up(tmp_path, memory):
    folder = RunFolder(tmp_path / "run")
    add(folder, 0, 1, 2)
    (folder.root / "trackers.json").write_text('{"memory": {"run_id": "old", "next_step": 1}}')
    trackers = Trackers(recipe(tmp_path), folder)
    trackers.start(3)
    trackers.close(failed=False)
    assert memory.starts == [("old", 1)]
    assert list(memory.steps) == [1, 2]


def test_a_failure_is_one_warning_and_nothing_is_lost(tmp_path, memory):
    failures = iter([True, True, False])

    def fail_twice(step: int) -> None:
        if step == 1 and next(failures, False):
            raise OSError("no space left on device")

    memory.do = staticmethod(fail_twice)
    folder, warned = RunFolder(tmp_path / "run"), []
    trackers = Trackers(recipe(tmp_path), folder, warn=warned.append)
    trackers.start(0)
    add(folder, 0, 1, 2)
    trackers.follow()
    _until(lambda: len(memory.steps) == 3)
    trackers.close(failed=False)
    assert list(memory.steps) == [0, 1, 2]
    assert len(warned) == 1
    assert "memory failed (OSError: no space left on device)" in warned[0]


def test_what_never_arrives_is_counted_and_sent_by_the_next_start(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(follower, "RETRY_S", 1e6)

    def fail(step: int) -> None:
        if step >= 1:
            raise ConnectionError("refused")

    memory.do = staticmethod(fail)
    folder, warned = RunFolder(tmp_path / "run"), []
    trackers = Trackers(recipe(tmp_path), folder, warn=warned.append)
    trackers.start(0)
    add(folder, 0, 1, 2)
    trackers.close(failed=False)
    assert "memory lacks the last 2 of the steps (ConnectionError: refused)" in warned[-1]
    assert len(warned) == 2
    memory.do = staticmethod(lambda step: None)
    again = Trackers(recipe(tmp_path), folder)
    again.start(3)
    again.close(failed=False)
    assert list(memory.steps) == [0, 1, 2]


def test_a_tracker_that_hangs_holds_up_neither_the_steps_nor_the_end(tmp_path, memory):
    hangs = threading.Event()
    memory.do = staticmethod(lambda step: hangs.wait())
    folder, warned = RunFolder(tmp_path / "run"), []
    trackers = Trackers(recipe(tmp_path), folder, warn=warned.append)
    trackers.start(0)
    add(folder, 0, 1)
    trackers.follow()
    trackers.close(failed=False, timeout_s=0.05)
    assert "lacks the last 2 of the steps (it hangs" in warned[0]
    hangs.set()


def test_a_copy_has_tracker_runs_of_its_own_and_a_moved_folder_keeps_them(tmp_path, memory):
    def start(root: Path) -> list[str]:
        folder, warned = RunFolder(root), []
        trackers = Trackers(recipe(tmp_path), folder, warn=warned.append)
        trackers.start(2)
        trackers.close(failed=False)
        return warned

    add(RunFolder(tmp_path / "run"), 0, 1)
    assert start(tmp_path / "run") == []
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert start(tmp_path / "moved") == []
    (told,) = start(tmp_path / "copy")
    assert told == (
        f"logging: {tmp_path / 'copy'} is a copy of {tmp_path / 'run'}; its trackers begin runs of "
        "their own, with all steps"
    )
    assert start(tmp_path / "copy") == []  # it has its own now
    assert memory.starts == [(None, 0), ("the id", 2), (None, 0), ("the id", 2)]
    state = json.loads((tmp_path / "moved/trackers.json").read_text())
    del state["run_folder"]  # as earlier versions wrote it
    (tmp_path / "moved/trackers.json").write_text(json.dumps(state))
    assert start(tmp_path / "moved") == []
    assert memory.starts[-1] == ("the id", 2)


def test_other_ranks_have_no_trackers(tmp_path, memory):
    trackers = Trackers(recipe(tmp_path), RunFolder(tmp_path / "run"), is_main=False)
    trackers.start(0)
    trackers.follow()
    trackers.close(failed=False)
    assert not (tmp_path / "run/trackers.json").exists()


def test_the_recipe_takes_a_list_or_a_branch(tmp_path):
    path = tmp_path / "recipe.yaml"
    text = (REPOSITORY / "launch/recipes/toy_moe.yaml").read_text()
    path.write_text(text + "\nlogging: [jsonl, tensorboard, wandb, mlflow]\n")
    read = load_recipe(path, ["logging.project=mine"]).logging
    assert read.trackers == ("jsonl", "tensorboard", "wandb", "mlflow")
    assert read.project == "mine"
    assert load_recipe(path, ["logging=[wandb]"]).logging.trackers == ("wandb",)
    with pytest.raises(InputError, match=r"wandb.*more than once"):
        load_recipe(path, ["logging=[wandb,wandb]"])


def test_a_missing_package_and_an_unknown_tracker_are_one_line(monkeypatch):
    monkeypatch.setattr("mrl.trackers.check._is_there", lambda package: False)
    check_trackers(LoggingConfig())
    with pytest.raises(InputError, match=r"pip install 'mrl\[wandb\]'"):
        check_trackers(LoggingConfig(trackers=("wandb",)))
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        check_trackers(LoggingConfig(trackers=("tensorbord",)))


def test_every_extra_is_in_pyproject():
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in text for name in ("tensorboard", "wandb", "mlflow"))


def _until(condition: Callable[[], bool]) -> None:
    """Wait for a thread that is about to do it."""
    waiting = threading.Event()
    for _ in range(2000):
        if condition():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not happen")
