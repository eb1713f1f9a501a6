"""`make process-table`: how it names processes, chooses trials, judges rows, and writes its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import process_table
from benchmarks.evidence.catalog import target_of
from benchmarks.evidence.result import provenance
from benchmarks.process_strikes import page
from benchmarks.process_strikes.lane import Lane, trials_of
from benchmarks.process_strikes.placements import SUBJECTS
from benchmarks.process_strikes.roles import Look, last_of_each, looks_of, roles
from benchmarks.process_strikes.strike import Happened, Row, Striker, Trial

RANK = ("python", "-u", "-m", "mrl", "train", "r.yaml")
MONITOR = ("python", "-I", "-S", "-c", "import sys; from mrl.watch.monitor import main; main()")
TREE = (
    Look(1, 0, "python", ("python", "-m", "mrl.launch", "-m", "mrl", "train", "r.yaml")),
    Look(2, 1, "python", RANK, rank="0"),
    Look(3, 1, "python", RANK, rank="1"),
    Look(4, 2, "python", MONITOR),
    Look(5, 2, "python", ("python", "-m", "mrl.rewards.worker", "first_char", "2", "30.0")),
    Look(6, 2, "python", RANK),
    Look(7, 3, "python", ("python", "-m", "mrl.engine_pool.remote")),
    Look(8, 7, "python", ("python", "-m", "mrl.engines.sglang.child")),
    Look(9, 8, "sglang::scheduler", ("sglang::scheduler          ",)),
    Look(10, 8, "sglang::detoken", ()),
    Look(11, 9, "lscpu", ("/usr/bin/lscpu", "-p=CPU")),
    Look(12, 2, "python", ("python", "-m", "mrl.something_new", "x")),
    Look(13, 2, "python", ("python", "-c", "from multiprocessing.resource_tracker import main")),
)


def test_every_process_of_a_tree_has_a_name() -> None:
    assert roles(TREE, 1, num_trainers=1) == {
        1: "launcher", 2: "rank 0", 3: "supervisor, rank 1", 4: "watchdog", 5: "reward worker",
        6: "fork of rank", 7: "rollout worker", 8: "engine server", 9: "scheduler",
        10: "detoken", 11: "lscpu", 12: "python -m mrl.something_new",
        13: "resource tracker of rank 0",
    }  # fmt: skip


def test_of_two_that_are_alike_the_last_is_struck() -> None:
    twice = (*TREE, Look(14, 3, "python", TREE[4].words))
    assert last_of_each(roles(twice, 1, 2))["reward worker"] == 14


def test_a_real_tree_is_found_whole() -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE)
    try:
        while len(found := looks_of(process.pid)) < 2:
            assert process.poll() is None
        assert {look.parent for look in found} == {0, process.pid}
        assert {look.pid for look in looks_of(os.getpid())} >= {look.pid for look in found}
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def test_every_process_is_tried_in_every_phase_in_which_it_was() -> None:
    seen = {
        "launcher": {"meeting": 3.0, "start": 5.0, "rollout": 1.0},
        "scheduler": {"start": 2.0, "logprobs": 0.1},
        "lscpu": {"start": 0.1},
        "fork of rank": {"save": 0.1},
    }
    trials = trials_of("p", seen)
    assert {(t.role, t.phase) for t in trials} == {
        ("launcher", "meeting"), ("launcher", "start"), ("launcher", "rollout"),
        ("scheduler", "start"), ("scheduler", "train"), ("fork of rank", "save"),
    }  # fmt: skip
    assert {t.signal for t in trials} == {"SIGSTOP", "SIGKILL"}
    content = process_table.content_of({}, {next(iter(SUBJECTS)): seen})
    assert [each["role"] for each in content["too_brief"]] == ["lscpu"]
    assert len(content["not_measured"]) == len(trials) + len(SUBJECTS) - 1


def test_words_choose_trials() -> None:
    trial = Trial("disaggregated run, free", "scheduler", "sync", "SIGSTOP")
    assert process_table.matches(trial, ["disaggregated", "SIGSTOP"])
    assert not process_table.matches(trial, ["colocated"])
    assert not process_table.matches(trial, ["disaggregated", "detokenizer"])


class _Subject:
    """A stand-in of a job that was ended, and goes on with what `found` says."""

    num_trainers, judges_bits, keeps_bits, job = 2, True, True, None

    def __init__(self, found: list[str]) -> None:
        self.found, self.anew = found, []

    def rows(self) -> int:
        return 3

    def paused(self) -> list[str]:
        return []

    def continued(self, done: int, command: str) -> list[str]:
        return self.found

    def begin_anew(self, name: str) -> None:
        self.anew.append(name)


ROOT = """
import subprocess, sys, time
def worker():
    return subprocess.Popen([sys.executable, "-c", "input()", "-m", "mrl.rewards.worker"],
                            stdin=subprocess.PIPE)
workers = [worker(), worker()]
while True:
    time.sleep(0.05)
    ended = [each for each in workers if each.poll() is not None]
    workers += [worker() for each in ended if sys.argv[1] == "replaced"]
    workers = [each for each in workers if each not in ended]
"""
"""A job with two workers that are alike."""


@pytest.mark.parametrize("happens", ["replaced", "went on"])
def test_a_process_is_replaced_by_one_that_was_not_there_before(
    happens: Happened, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", ROOT, happens]) as root:
        job: Any = SimpleNamespace(
            process=root, log=tmp_path / "log", look=lambda: [1, 2], has_begun=lambda: True
        )
        striker = Striker(_Subject([]))  # pyright: ignore[reportArgumentType]
        try:
            while list(striker.roles(job).values()).count("reward worker") < 2:
                assert root.poll() is None
            steps = iter([7, *[7] * 60, *[9] * 1000])
            striker.subject.rows = lambda: next(steps)
            victim = psutil.Process(striker.victims(job)["reward worker"])
            victim.kill()
            row = Row("p", "reward worker", "sync", "SIGKILL", "was not there")
            striker._follow(row, job, victim, 0)
            assert row.happened == happens
            assert row.seconds > 0.5  # two steps from the strike on
        finally:
            root.kill()


def test_a_row_whose_job_does_not_continue_as_without_the_fault_fails() -> None:
    for found in ([], ["step 2 has other samples"]):
        written: list[Row] = []
        subject = _Subject(found)
        lane = Lane(subject, written.append)  # pyright: ignore[reportArgumentType]
        lane.owed = [Row("p", "rank 0", "sync", "SIGKILL", "ended", exit_code=71)]
        lane.run([])
        (row,) = written
        assert row.passed == (not found)
        assert subject.anew == (["rank_0_sync_SIGKILL"] if found else [])


def test_the_page_shows_what_failed_and_what_was_not_measured() -> None:
    trial = Trial("colocated run", "scheduler", "sync", "SIGSTOP")
    waits = Row(*trial, happened="waits", seconds=400.0, problems=["still waiting after 400 s"])
    ended = Row(
        *trial._replace(phase="save"), happened="ended", noticed_s=3.2, seconds=9.1, exit_code=72
    )
    rows = [asdict(waits), asdict(ended), trial._replace(phase="train")._asdict()]
    text = page.markdown({"rows": rows, "not_measured": ["colocated service"], "too_brief": []})
    assert (
        "| scheduler | SIGSTOP | - | - | **FAILED**: waits, 400 s | - | not measured "
        "| 3 s, code 72, 9 s |" in text
    )
    assert "Not measured at all: colocated service." in text
    assert "- colocated run: SIGSTOP of scheduler at sync: still waiting after 400 s" in text


def test_a_call_goes_on_from_the_committed_result_and_its_own_rows_win(tmp_path: Path) -> None:
    old, new = (
        Row("p", "rank 0", "sync", "SIGKILL", "waits"),
        Row("p", "rank 0", "train", "SIGKILL", "ended"),
    )
    missing = old.trial._replace(phase="save")._asdict()
    committed = tmp_path / "committed.json"
    content = {
        "rows": [asdict(old), asdict(new), missing],
        "seen": {"p": {"rank 0": {"sync": 9.0}}},
        "digest": "of other code",
    }
    committed.write_text(json.dumps(content))
    folder = tmp_path / "table"
    folder.mkdir()
    assert process_table.Records(folder, committed).rows() == {}
    content["digest"] = provenance(target_of("process_table").measures)["digest"]
    committed.write_text(json.dumps(content))
    records = process_table.Records(folder, committed)
    assert records.rows() == {old.trial: old, new.trial: new}
    records.add(
        Row(*old.trial, happened="ended", cause=f"its log is {folder}/run/logs/engine_00.log")
    )
    found = process_table.Records(folder, committed)
    assert found.rows()[old.trial].happened == "ended"
    assert found.rows()[old.trial].cause == "its log is run/logs/engine_00.log"
    assert found.seen() == content["seen"]


def test_strikes_that_a_job_survives_come_first_and_share_a_start() -> None:
    seen = {"rank 0": {"rollout": 9.0}, "scheduler": {"rollout": 5.0, "sync": 5.0}}
    order = [(t.role, t.signal, t.phase) for t in trials_of("p", seen)]
    assert order == [
        ("scheduler", "SIGKILL", "rollout"), ("scheduler", "SIGKILL", "sync"),
        ("scheduler", "SIGSTOP", "rollout"), ("scheduler", "SIGSTOP", "sync"),
        ("rank 0", "SIGKILL", "rollout"), ("rank 0", "SIGSTOP", "rollout"),
    ]  # fmt: skip
