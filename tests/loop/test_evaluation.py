"""avg@k and pass@k: the formulas, and the same numbers in training and from the checkpoint."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.cli import main
from mrl.collect.evaluation import eval_metrics, pass_at_k
from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.collect.task import Task
from mrl.config import EvalSetConfig, dump_recipe, load_recipe
from mrl.data.eval_sets import EvalSet
from mrl.engines.base import Completion, Request, SamplingParams
from mrl.errors import ExitCode, InputError, RunFailed
from mrl.run.evaluations import folder_of_settings, other_settings, write_evaluation
from mrl.run.folder import RunFolder
from mrl.types import Prompt, RoutingTrace, Sample, SampleGroup, VersionSpan
from tests.loop.conftest import TOY_RECIPE, Toy, trained
from tests.loop.test_refusals import refused
from tests.ranks import run_ranks
from tests.release import release

DATA = "launch/recipes/data/first_char.jsonl"
SETS = (
    f"eval.sets=[{{name: few, path: {DATA}, num_prompts: 3, samples_per_prompt: 4, "
    f"pass_threshold: 0.05}}, {{name: short, path: {DATA}, num_prompts: 2, max_response_len: 4, "
    "samples_per_prompt: 2, temperature: 0}]"
)


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (5, 3), (4, 4), (1, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int, c: int) -> None:
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(
            sum(min(subset) < c for subset in subsets) / len(subsets)
        )


def make_group(rewards: list[float], finish_reason: str = "stop") -> SampleGroup:
    sample = Sample(
        group_id=0,
        token_ids=torch.arange(6),
        prompt_len=2,
        loss_mask=torch.arange(6) >= 2,
        rollout_logprobs=torch.zeros(6),
        weight_versions=(VersionSpan(0, 2, 6),),
        finish_reason=finish_reason,
    )
    prompt = Prompt("0", torch.arange(2), "ab", {}, "x:1")
    return SampleGroup(prompt, [sample] * len(rewards), torch.tensor(rewards))


def test_metrics_of_a_set() -> None:
    groups = [
        make_group([1.0, 0.5, 0.0, 1.0]),
        make_group([0.0, math.nan, 0.0, 0.0]),
        make_group([math.nan] * 4, "length"),
    ]
    recipe = load_recipe(TOY_RECIPE)
    eval_set = EvalSet(EvalSetConfig(name="s", path="-", samples_per_prompt=4), recipe, [])
    found = eval_metrics(eval_set, groups)
    assert found["eval/s/avg@4"] == pytest.approx((0.625 + 0.0) / 2)
    assert found["eval/s/avg@4_stderr"] == pytest.approx(0.625 / math.sqrt(2) / math.sqrt(2))
    assert found["eval/s/pass@1"] == pytest.approx((0.5 + 0.0) / 2)
    assert found["eval/s/pass@2"] == pytest.approx((1 - 1 / 6 + 0.0) / 2)
    assert found["eval/s/pass@4"] == 1.0  # only one prompt has four scored samples
    assert found["eval/s/unscored"] == 5.0
    assert found["eval/s/truncated"] == pytest.approx(1 / 3)
    assert found["eval/s/response_len"] == 4.0


def test_a_reward_at_the_threshold_passes() -> None:
    """0.7 is less than 0.7 where only one of them is a float32."""
    recipe = load_recipe(TOY_RECIPE)
    config = EvalSetConfig(name="s", path="-", pass_threshold=0.7)
    found = eval_metrics(EvalSet(config, recipe, []), [make_group([0.7])])
    assert found["eval/s/pass@1"] == 1.0


class OneAnswer:
    """An engine that gives each request one token and its routes."""

    def generate(self, requests: list[Request]) -> Iterator[Completion]:
        for request in requests:
            num_tokens = len(request.token_ids) + 1
            ids = torch.zeros(num_tokens - 1, 1, 1, dtype=torch.uint8)
            spans = (VersionSpan(0, num_tokens - 1, num_tokens),)
            rows = (VersionSpan(0, 0, num_tokens - 1),)
            trace = RoutingTrace(ids, (1,), 2, rows, 0)
            yield Completion(
                request.request_id, torch.tensor([1]), torch.zeros(1), "stop", spans, trace
            )


@pytest.mark.parametrize("keeps", [False, True])
def test_routes_of_an_evaluation_are_not_kept(keeps: bool) -> None:
    """The routes of 1,000 samples of 32k tokens of a 30B model take 12 GB."""
    seen: list[SampleGroup] = []
    scoring: Any = SimpleNamespace(begin=seen.append)
    engine: Any = OneAnswer()
    prompt = Prompt("0", torch.arange(2), "ab", {}, "x:1")
    rollout = SingleTurnRollout(start_groups([prompt], 2), SamplingParams(max_new_tokens=1), 0)
    Task(rollout, scoring, "eval", keeps_routes=keeps).run(engine)
    assert [sample.routing is not None for sample in seen[0].samples] == [keeps] * 2


@pytest.mark.timeout(400)
@pytest.mark.parametrize("resumes", [False, release(True)])
def test_training_evaluates_and_the_checkpoint_gives_the_same_numbers(
    resumes: bool, toy: Toy, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    overrides = toy.overrides(output, "train.num_steps=2", "eval.every=2", SETS)
    run_ranks(1, trained, overrides, folder=tmp_path / "out")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    measured = [[key for key in row if key.startswith("eval/")] for row in rows]
    assert [len(keys) > 0 for keys in measured] == [True, False]
    assert {"eval/few/avg@4", "eval/few/pass@1", "eval/few/pass@4", "eval/short/avg@2"} <= set(
        measured[0]
    )
    assert rows[0]["time/eval_s"] > 0
    evals = output / "evals"
    first = json.loads((evals / "step_000000.json").read_text())
    assert first == {key: rows[0][key] for key in ("step", *measured[0])}
    assert {f.name for f in evals.glob("*.json")} == {f"step_00000{step}.json" for step in (0, 2)}
    samples = [json.loads(line) for line in (evals / "step_000002.jsonl").read_text().splitlines()]
    few = [row for row in samples if row["set"] == "few"]
    assert len(few) == 12
    short = [row for row in samples if row["set"] == "short"]
    assert {row["response_len"] for row in short} <= {1, 2, 3, 4}
    answers = [row["completion"] for row in short]
    assert answers[::2] == answers[1::2]  # greedy: both samples of a prompt are the same
    final = json.loads((evals / "step_000002.json").read_text())
    assert final["eval/few/avg@4"] == pytest.approx(
        sum(row["reward"] for row in few) / 12, abs=1e-6
    )

    before = (evals / "step_000002.jsonl").read_text()
    commands = {"alone": evaluated} | ({"killed_during_the_last": trained} if resumes else {})
    for name, command in commands.items():
        (evals / "step_000002.json").unlink()
        (evals / "step_000002.jsonl").unlink()
        run_ranks(1, command, overrides, folder=tmp_path / name)
        assert (evals / "step_000002.jsonl").read_text() == before
        assert json.loads((evals / "step_000002.json").read_text()) == final
    assert (evals / "logs/engine_00.log").exists()
    if resumes:
        run_ranks(1, evaluated, [*overrides, "rollout.temperature=0.7"], folder=tmp_path / "warm")
        (other,) = evals.glob("other_*/step_000002.jsonl")
        assert other.read_text() != before
        assert json.loads((evals / "step_000002.json").read_text()) == final
    again = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert again == rows


def test_ranks_wait_for_each_other_as_long_as_engines_may_take(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many long answers a set, and the sets one after the other; and ranks die with their torchrun."""
    waits, parents = [], []

    def init_mesh(*args: object, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise RunFailed("far enough")

    monkeypatch.setattr("parallel.prepare", lambda: None)
    monkeypatch.setattr("parallel.mesh.init_mesh", init_mesh)
    monkeypatch.setattr("mrl.system.processes.die_with_parent", parents.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    base = [str(TOY_RECIPE), *toy.overrides(tmp_path / "run", SETS)]
    for command in ("eval", "train"):
        with pytest.raises(SystemExit, match=str(int(ExitCode.FAILED))):
            main([command, *base, "rollout.request_timeout_s=5000"])
    assert waits == [25_600.0, 25_600.0]
    assert parents == [os.getppid()] * 2


def test_evaluations_of_weights_that_a_resumed_run_drops_are_set_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (0, 2, 4):
        folder.write_evaluation(step, {"eval/s/avg@1": 0.5}, [])
    folder.rewind(2)
    assert sorted(f.name for f in folder.evals.glob("*.json*")) == [
        f"step_00000{step}.{kind}" for step in (0, 2) for kind in ("json", "jsonl")
    ]
    assert (folder.evals / "dropped_0/step_000004.json").exists()


def kept_evaluations(evals: Path) -> list[float]:
    rows = [json.loads(file.read_text()) for file in evals.rglob("step_000002.json")]
    samples = [file.read_bytes() for file in evals.rglob("step_000002.jsonl")]
    assert len(set(samples)) == len(samples) == len(rows)
    return sorted(row["eval/s/avg@1"] for row in rows)


def test_no_evaluation_replaces_another_one(tmp_path: Path) -> None:
    """Also if several are written at the same time."""
    folder = RunFolder(tmp_path)

    def write(number: int) -> None:
        lines = [b'{"reward": %d}\n' % number] * 1000
        folder.write_evaluation(2, {"eval/s/avg@1": float(number)}, lines)

    for _ in range(2):
        write(0)
    assert kept_evaluations(folder.evals) == [0.0]  # the second was the same
    write(1)
    newest = json.loads(folder.evaluation_file(2).read_text())
    assert newest == {"step": 2, "eval/s/avg@1": 1.0}
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(2, 8)))
    assert kept_evaluations(folder.evals) == [float(number) for number in range(8)]


def test_an_evaluation_with_other_settings_has_a_folder_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder, base = RunFolder(run), [f"output_dir={run}", SETS]
    dump_recipe(load_recipe(TOY_RECIPE, base), folder.config)
    folder.add_metrics({"step": 0.0})

    def others(*overrides: str) -> dict[str, Any]:
        return other_settings(run, folder.check(load_recipe(TOY_RECIPE, overrides), None))

    assert not others(*base, "rollout.request_timeout_s=5000", "optimizer.lr=1", "eval.every=1")
    assert others(*base, "rollout.temperature=0.5") == {"rollout.temperature": 0.5}
    few = others(*base, f"eval.sets=[{{name: few, path: {DATA}, num_prompts: 2}}]")
    assert list(few) == ["eval.sets"]
    first, again = folder_of_settings(folder.evals, few), folder_of_settings(folder.evals, few)
    second = folder_of_settings(folder.evals, others(*base, "rollout.temperature=0.5"))
    assert first == again != second
    assert json.loads((second / "settings.json").read_text()) == {"rollout.temperature": 0.5}
    write_evaluation(first, 4, {}, [])
    folder.rewind(2)
    assert (first / "dropped_0/step_000004.json").exists()
    dump_recipe(load_recipe(TOY_RECIPE, base[:1]), folder.config)  # it has no sets of its own
    assert not others(*base)


def test_a_run_may_go_on_with_other_time_limits(tmp_path: Path) -> None:
    """The message of a limit that was too short says to raise it."""
    dump_recipe(load_recipe(TOY_RECIPE), tmp_path / "config.yaml")
    RunFolder(tmp_path).add_metrics({"step": 0.0})  # a run without a step may become any other
    limits = ("start", "request", "stall")
    more = [f"rollout.{name}_timeout_s=9999" for name in limits]
    RunFolder(tmp_path).check(load_recipe(TOY_RECIPE, [*more, "reward_timeout_s=1"]))
    with pytest.raises(InputError, match="holds a run of another recipe"):
        RunFolder(tmp_path).check(load_recipe(TOY_RECIPE, [*more, "seed=5"]))


def evaluated(overrides: list[str]) -> None:
    """Run `mrl eval`, which fails here if it builds an optimizer, a learner or a critic."""
    from mrl.learn.learner import Learner
    from parallel.critic import Critic
    from parallel.megatron_model import MegatronModel

    def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError("an evaluation needs no optimizer, learner or critic")

    for each, method in (
        (MegatronModel, "make_optimizer"),
        (Learner, "__init__"),
        (Critic, "__init__"),
    ):
        setattr(each, method, refuse)
    main(["eval", str(TOY_RECIPE), *overrides])


def test_what_cannot_be_evaluated_is_refused(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [str(TOY_RECIPE), *toy.overrides(tmp_path / "run")]
    assert "eval.sets is empty" in refused(capsys, ["eval", *base])
    assert "eval.every is 5" in refused(capsys, ["check", *base, "eval.every=5"])
    assert "no checkpoint of that step" in refused(capsys, ["eval", *base, SETS, "--step", "7"])
    twice = f"eval.sets=[{{name: a, path: {DATA}}}, {{name: a, path: {DATA}}}]"
    assert "expected each once" in refused(capsys, ["check", *base, twice])
    many = f"eval.sets=[{{name: a, path: {DATA}, num_prompts: 1000000}}]"
    assert "num_prompts is 1000000" in refused(capsys, ["check", *base, many])
    bad = f"eval.sets=[{{name: a, path: {DATA}, reward: frist_char}}]"
    assert "frist_char" in refused(capsys, ["check", *base, bad])


@pytest.mark.parametrize("words", [["runs/a", "step=20"], ["runs/a@20"], ["runs/a", "iter=20"]])
def test_a_step_that_is_given_as_a_key_is_an_option(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "as an option: mrl eval runs/a --step 20" in refused(capsys, ["eval", *words])
