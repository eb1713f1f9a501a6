"""`make peers`: medians, ratios and goals from outcomes, and the commands of its sides."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peer_runs import run
from benchmarks.peer_runs.run import Outcome, PeakMemory, Work, run_module, train_with_mrl
from studies import peer_rewards

WORK = Work("no-such-model", 2, 2, 2, 4, 4)


def outcome(step_s: list[float], generate_s: list[float]) -> Outcome:
    tokens = [100.0] * len(step_s)
    return Outcome(2.0, 10, step_s, generate_s, tokens, [0.1] * len(step_s) + [0.5])


def test_ratios_are_of_medians_over_all_steps() -> None:
    ours = peers.figures([outcome([1.0, 9.0], [0.5, 0.6]), outcome([2.0], [0.4])])
    theirs = peers.figures([outcome([4.0, 4.0], [1.0, 2.0])])
    assert ours["step_s"] == 2.0
    assert ours["generate_s"] == 0.5
    assert ours["rest_s"] == 1.6  # the median of 0.5, 8.4 and 1.6
    assert ours["tokens_per_s"] == 200.0
    assert ours["last_reward"] == 0.5
    over = peers.ratios({"mrl": ours, "trl": theirs})
    assert over["trl"]["step_s"] == 0.5
    assert over["trl"]["start_s"] == 1.0


def test_the_part_that_takes_long_runs_only_by_name() -> None:
    every = peers.parts("toy", "wide", quick=False)
    assert [part for part in every if part not in peers.choose(every, [])] == [every[2]]
    assert [part.name for part in peers.choose(every, ["SmolLM2"])] == ["SmolLM2"]
    with pytest.raises(ValueError, match="got nothing, expected some of toy, long tail"):
        peers.choose(every, ["nothing"])


def test_goals_count_only_with_their_peer() -> None:
    part = peers.parts("toy", "wide", quick=False)[0]
    found = {
        "mrl": peers.figures([outcome([1.0], [0.5])]),
        "trl": peers.figures([outcome([1.0], [0.5])]),
    }
    (goal,) = peers.judge(part, found)
    assert (goal["peer"], goal["ratio"], goal["reached"]) == ("trl", 1.0, True)
    found["before"] = peers.figures([outcome([1.0], [1.0])])
    assert [each["reached"] for each in peers.judge(part, found)] == [True, False]


def test_sides_take_turns_with_one_seed_for_all() -> None:
    calls = []

    def side(name: str) -> peers.Side:
        def start(work: Work) -> Outcome:
            calls.append((name, work.seed))
            return outcome([1.0], [0.5])

        return start

    found = peers.measure(WORK, {"mrl": side("mrl"), "trl": side("trl")}, 2)
    assert calls == [("mrl", 0), ("trl", 0), ("mrl", 1), ("trl", 1)]
    assert len(found["mrl"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "got 0, expected at least 1"),
        (["--before", "no-such-folder"], "has no mrl/_C"),
        (["--packages", "no-such-folder"], "has no TRL"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", *arguments])
    with pytest.raises(SystemExit) as left:
        peers.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_side_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2(.|\n)*no folder no-such-model"):
        train_with_mrl(WORK)


def test_a_module_gets_its_work_and_returns_its_steps(tmp_path: Path) -> None:
    """The first step of a run warms up, and is left out of the times."""
    (tmp_path / "stub_peer.py").write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "work = json.loads(Path(sys.argv[1]).read_text())\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "kept = {'tokens': work['samples']}\n"
        "steps = [dict(generate_s=i, step_s=2 * i, reward=i, **kept) for i in (9, 1, 3)]\n"
        "Path(sys.argv[2]).write_text(json.dumps(dict(start_s=4.5, steps=steps)))\n"
    )
    found = run_module("stub_peer", WORK, packages=tmp_path)
    assert (found.step_s, found.generate_s, found.tokens) == ([2, 6], [1, 3], [2, 2])
    assert found.rewards == [9, 1, 3]
    assert found.start_s == 4.5


def test_peak_memory_counts_a_command_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "POLL_S", 0.05)
    child = "import time; x = bytearray(b'1') * 100_000_000; time.sleep(2)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent])
    memory = PeakMemory(process.pid)
    memory.start()
    deadline = time.monotonic() + 20
    while memory._peak < 100_000_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert 100_000_000 < memory.stop() < 300_000_000


def test_rewards_differ_beyond_two_standard_errors() -> None:
    gap, error = peer_rewards.difference([0.5, 0.7], [0.2, 0.4])
    assert gap == pytest.approx(0.3)
    assert error == pytest.approx(0.02**0.5)  # two variances of 0.02, over two seeds each


def test_runs_on_file_are_not_repeated(tmp_path: Path) -> None:
    calls = []

    def side(work: Work) -> Outcome:
        calls.append(work.seed)
        return outcome([1.0], [0.5])

    for _ in range(2):
        assert peer_rewards.rewards_of("trl", side, WORK, tmp_path) == [0.1, 0.5]
    assert calls == [0]
