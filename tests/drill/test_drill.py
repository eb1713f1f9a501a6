"""`mrl drill`: what it watches, what it finds wrong, and the table of a real drill."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.config import load_recipe
from mrl.drill import FAULTS, Drill
from mrl.drill.bad_reward import TRIAL
from mrl.drill.chain import problems_of_end
from mrl.drill.job import Job, Unexpected, is_alive
from mrl.drill.stopped import BAD_REWARD, flip
from mrl.errors import InputError, RunFailed
from mrl.preflight.reward_trial import WRONG
from mrl.rewards.runner import RewardRunner
from mrl.run.failure import Failure, write_failure
from tests.loop.conftest import COMMAND_TIMEOUT_S, TOY_RECIPE, Toy, environment
from tests.loop.forked import Command
from tests.loop.test_refusals import refused
from tests.sample_groups import group
from tests.waiting import wait_until


def job(folder: Path, script: str) -> Job:
    """A shell script in the place of the launcher."""
    for name in ("run", "tmp"):
        (folder / name).mkdir()
    return Job(["sh", "-c", script], folder / "run", folder / "log", folder / "tmp", limit_s=60)


def test_an_end_as_it_should_be_has_no_problems(tmp_path: Path) -> None:
    one = job(tmp_path, "echo 'mrl: rank 1 was killed'; exit 71")
    write_failure(one.run, Failure(what="rank 1", exit_code=71, command="mrl train run"))
    assert problems_of_end(one, one.end(), (71,)) == []
    assert one.left() == []


def test_what_is_left_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.drill.job.GONE_WITHIN_S", 0.0)
    one = job(tmp_path, "sleep 1000 & touch $TMPDIR/litter; read line < /dev/null; echo Traceback")
    wait_until(lambda: len(one.look()) > 1 or one.process.poll() is not None)
    one.look()
    code = one.end()
    found = problems_of_end(one, code, (71, 75))
    assert any("litter is left" in text for text in found)
    assert any("exit code 0, expected 71 or 75" in text for text in found)
    one.kill()
    assert one.left() == [f"{one.scratch / 'litter'} is left"]


@pytest.mark.parametrize("name", ["raises", "hangs"])
def test_its_rewards_pass_the_trial_before_a_run(name: str, toy: Toy, tmp_path: Path) -> None:
    """Otherwise the start would be refused, and the fault never be provoked in training."""
    assert {WRONG, ""} == TRIAL
    main(["check", str(TOY_RECIPE), *toy.overrides(tmp_path, f"reward={BAD_REWARD}:{name}")])


def test_what_hangs_fails_samples_also_in_a_worker_that_was_started_again() -> None:
    """After a group hangs, the runner scores each of its samples alone, in a new process."""
    groups = [group([0.0] * 4, number) for number in range(6)]
    with (
        RewardRunner(f"{BAD_REWARD}:hangs", 0.5) as runner,
        pytest.raises(RunFailed, match="hangs"),
    ):
        runner.score(groups, [[WRONG] * 4] * 6)


LISTENS = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
open(sys.argv[1], "w").write(f"{server.getsockname()[1]}\\n")
time.sleep(1000)
"""


def test_a_port_is_left_only_where_the_job_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.drill.job.GONE_WITHIN_S", 0.0)
    script, said = tmp_path / "listens.py", tmp_path / "port"
    script.write_text(LISTENS)
    one = job(tmp_path, f"exec {sys.executable} {script} {said}")
    wait_until(lambda: said.exists() and said.read_text().endswith("\n"))
    port = int(said.read_text())
    with socket.create_server(("127.0.0.1", 0)) as other:
        one.ports = {port, other.getsockname()[1]}
        assert [text for text in one.left() if "port" in text] == [f"port {port} is left"]
    one.kill()


def test_a_failure_without_a_report_is_a_problem(tmp_path: Path) -> None:
    one = job(tmp_path, "exit 71")
    write_failure(one.run, Failure(what="of an earlier start", exit_code=71, command="x", time=1.0))
    found = problems_of_end(one, one.end(), (71,))
    one.kill()
    assert found == ["no RUN/failure.json of this start", "no block of text on the terminal"]


def test_an_early_end_is_unexpected(tmp_path: Path) -> None:
    one = job(tmp_path, "exit 3")
    with pytest.raises(Unexpected, match="ended with code 3 before step 0 was done"):
        one.wait_for_rows(1)
    one.kill()


def test_the_engine_of_a_rank_is_found(tmp_path: Path) -> None:
    one = job(tmp_path, "bash -c 'exec -a sglang::scheduler sleep 1000' & sleep 1000 & wait")
    # The words of the shell, and of its child before it is bash, have the name, too.
    wait_until(
        lambda: [e.cmdline()[:1] for e in one.engine_of(one.process)] == [["sglang::scheduler"]]
    )
    (engine,) = one.engine_of(one.process)
    one.look()
    assert engine in one.engines()
    one.kill()
    assert not is_alive(engine)


def row(step: int, **more: Any) -> str:
    values = {"step": step, "grad_norm": 1.0, "time/step_s": time.time()}
    return json.dumps({**values, **more}) + "\n"


def drilled(folder: Path, toy: Toy) -> Drill:
    """A drill whose run and reference have two equal steps."""
    overrides = toy.overrides(folder / "mine", "logging=[jsonl,tensorboard]", "eval.every=0")
    drill = Drill(load_recipe(TOY_RECIPE, overrides), 1, folder / "drill", 8)
    for run in (drill.run, drill.reference):
        (run / "rollouts").mkdir(parents=True)
        (run / "metrics.jsonl").write_text(row(0) + row(1))
        for step in range(2):
            (run / f"rollouts/step_{step:06d}.jsonl").write_text('{"completion": "a"}\n')
    return drill


def test_the_recipe_of_a_drill_writes_into_its_folder_only(toy: Toy, tmp_path: Path) -> None:
    drill = drilled(tmp_path, toy)
    recipe = load_recipe(drill.file)
    assert recipe.output_dir == str(drill.run)
    assert recipe.logging.trackers == ("jsonl",)
    assert (recipe.train.num_steps, recipe.checkpoint.save_every) == (8, 1)
    assert drill.differences() == []
    with pytest.raises(InputError, match="is not empty"):
        Drill(drill.recipe, 1, drill.folder)


def test_the_temporary_directory_is_made_at_the_first_start(toy: Toy, tmp_path: Path) -> None:
    drill = drilled(tmp_path, toy)
    drill.end()
    assert "scratch" not in vars(drill)
    made = drill.scratch
    assert made.is_dir()
    drill.end()
    assert not made.exists()


@pytest.mark.parametrize(("code", "found"), [(0, []), (3, ["ended with code 3"])])
def test_a_run_whose_last_step_is_saved_has_no_further_one(
    code: int, found: list[str], toy: Toy, tmp_path: Path
) -> None:
    drill = drilled(tmp_path, toy)
    (drill.run / "checkpoints").mkdir()
    (drill.run / "checkpoints/latest_checkpointed_iteration.txt").write_text("8")
    drill.job = job(tmp_path, f"exit {code}")
    assert [text.partition("is done ")[2] for text in drill.check_step_after(8)] == found


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("metrics.jsonl", row(0) + row(1, grad_norm=1.0 + 1e-16 * 3), "step 1 has other values of"),
        ("metrics.jsonl", row(0) + row(2), "metrics.jsonl has the steps [0, 2]"),
        ("rollouts/step_000001.jsonl", '{"completion": "b"}\n', "step 1 has other samples"),
    ],
)
def test_one_bit_is_found(file: str, text: str, expected: str, toy: Toy, tmp_path: Path) -> None:
    drill = drilled(tmp_path, toy)
    (drill.run / file).write_text(text)
    assert any(expected in found for found in drill.differences())


@pytest.mark.release
def test_other_weights_are_found(toy: Toy, tmp_path: Path, recorded: Path) -> None:
    drill = drilled(tmp_path, toy)
    for run in (drill.reference, drill.run):
        shutil.copytree(recorded / "checkpoints", run / "checkpoints")
    drill._note_digests(drill.reference)
    assert drill.differences() == []
    digests = drill._digests[4]
    drill._digests[4] = dict.fromkeys(digests, "0" * 64)
    assert digests
    assert drill.differences() == ["the checkpoint with 4 steps has other bits"]


def test_flip_changes_one_bit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(9))
    flip(file)
    assert file.read_bytes() == bytes([0, 0, 0, 0, 16, 0, 0, 0, 0])


def test_what_cannot_be_provoked_says_why(toy: Toy, tmp_path: Path) -> None:
    saved = load_recipe(TOY_RECIPE, toy.overrides(tmp_path, "debug.load_rollouts=/x"))
    assert "no engine" in FAULTS["kill-engine"].why_not(saved)
    assert FAULTS["kill-rank-train"].why_not(saved) == ""
    slow = load_recipe(TOY_RECIPE, toy.overrides(tmp_path, "rollout.stall_timeout_s=4000"))
    assert "stall_timeout_s" in FAULTS["stop-engine"].why_not(slow)


APART = ("rollout.placement=disaggregated", "rollout.num_ranks=1")


def test_faults_of_rollout_ranks_need_some(toy: Toy, tmp_path: Path) -> None:
    colocated = load_recipe(TOY_RECIPE, toy.overrides(tmp_path))
    apart = load_recipe(TOY_RECIPE, toy.overrides(tmp_path, *APART))
    for name in ("kill-worker", "stop-worker", "kill-supervisor"):
        assert "colocated" in FAULTS[name].why_not(colocated)
        assert FAULTS[name].why_not(apart) == ""
    slow = load_recipe(TOY_RECIPE, toy.overrides(tmp_path, *APART, "async.worker_timeout_s=999"))
    assert "worker_timeout_s=999 s is longer" in FAULTS["stop-worker"].why_not(slow)
    drill = Drill(apart, 3, tmp_path / "apart")
    assert (drill.last_trainer, drill.engine_leader) == (1, 2)
    drill = Drill(colocated, 3, tmp_path / "colocated")
    assert (drill.last_trainer, drill.engine_leader) == (2, 0)


def test_bits_are_judged_where_a_schedule_is_fixed(toy: Toy, tmp_path: Path) -> None:
    free = [*APART, "async.max_staleness=1", "algorithm.importance=tis"]
    for number, (keys, expected) in enumerate(
        [(APART, True), (free, False), ([*free, "async.deterministic=true"], True)]
    ):
        recipe = load_recipe(TOY_RECIPE, toy.overrides(tmp_path, *keys))
        assert Drill(recipe, 2, tmp_path / f"{number}").judges_bits is expected


def test_the_command_lists_its_faults_and_refuses_others(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["drill", str(TOY_RECIPE), *toy.overrides(tmp_path / "mine")]
    main([*command, "--list"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*FAULTS, "network partition"))
    assert "expected some of kill-rank-start" in refused(capsys, [*command, "--only", "kil-rank"])
    (tmp_path / "mine_drill").mkdir()
    (tmp_path / "mine_drill/mine").touch()
    assert "is not empty" in refused(capsys, command)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine_drill"]


@pytest.mark.release
@pytest.mark.timeout(500)
def test_a_drill_of_the_toy_recipe(toy: Toy, tmp_path: Path) -> None:
    words = ["drill", str(TOY_RECIPE), *toy.overrides(tmp_path / "mine")]
    words += ["--only", "kill-rank-train", "damaged-checkpoint"]
    done = Command(words, environment(), tmp_path / "out").finish(2 * COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 passed, 0 failed"
    rows = json.loads((tmp_path / "mine_drill/drill.json").read_text())
    by_name = {each["fault"]: each for each in rows}
    assert by_name["kill-rank-train"]["exit_code"] == 71
    assert "the same bits" in by_name["damaged-checkpoint"]["happened"]
    assert not (tmp_path / "mine").exists()


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_drill_of_a_disaggregated_recipe(toy: Toy, tmp_path: Path) -> None:
    keys = toy.overrides(tmp_path / "mine", *APART, "async.worker_timeout_s=15")
    words = ["drill", str(TOY_RECIPE), *keys, "--steps", "10", "--only", "kill-rank-rollout"]
    words += ["kill-engine", "kill-worker", "stop-worker", "kill-supervisor"]
    done = Command(words, environment(), tmp_path / "out").finish(4 * COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "6 passed, 0 failed"
    rows = json.loads((tmp_path / "mine_drill/drill.json").read_text())
    by_name = {each["fault"]: each for each in rows}
    for name in ("kill-rank-rollout", "kill-supervisor"):
        assert by_name[name]["exit_code"] == 71
    for name in ("kill-worker", "stop-worker"):
        assert by_name[name]["happened"].startswith("1 worker replaced; the steps were done, with")
