"""Every key that a resumed run may change freely, changed: the run goes on, and as it was where it can.

`SAME` lists changes that must not move a bit of samples, losses and weights; `OTHER` those that may, of
the trainer's sums or of the batch that an engine computes; `RANKS` those that need two ranks. A quick
test looks that no free key is missing here.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.config import load_recipe
from mrl.config.suggest import all_keys
from mrl.run.changes import RULES, Kind, find_changes, flatten, is_in, rule_of
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model
from tests.loop.conftest import TOY_RECIPE
from tests.tenants.serving import ROOT

LIMIT_S = 400
BASE = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_len=12",
    "rollout.min_response_len=0",
    "rollout.batch_invariant=true",
    "rollout.max_total_tokens=4096",
    "train.micro_batch_tokens=160",
    "train.num_steps=2",
    "checkpoint.save_every=1",
    "optimizer.lr=3e-3",
)
LONGER = "train.num_steps=4"
LETTERS = ROOT / "launch/recipes/data/first_char.jsonl"
EVAL = f"eval.sets=[{{path: {LETTERS}, name: letters, num_prompts: 2"

SAME: dict[str, str] = {
    "train.recompute": "train.recompute=true",
    "rollout.max_total_tokens": "rollout.max_total_tokens=1024",
    "rollout.mem_fraction_static": "rollout.mem_fraction_static=0.3",
    "rollout.max_running_requests": "rollout.max_running_requests=3",
    "rollout.server_args": "rollout.server_args={schedule_conservativeness: 0.5}",
    "rollout.start_timeout_s": "rollout.start_timeout_s=300",
    "rollout.request_timeout_s": "rollout.request_timeout_s=300",
    "rollout.stall_timeout_s": "rollout.stall_timeout_s=100",
    "rollout.max_restarts": "rollout.max_restarts=0",
    "rollout.weight_bucket_mb": "rollout.weight_bucket_mb=1",
    "rollout.weight_sync": "rollout.weight_sync=disk",
    "rollout.canary_prompts": "rollout.canary_prompts=1",
    "rollout.canary_tolerance": "rollout.canary_tolerance=0.5",
    "eval": f"eval.every=1 {EVAL}, samples_per_prompt: 2, max_response_len: 5, top_k: 3}}]",
    "guards.ratio_tolerance": "guards.ratio_tolerance=0.5",
    "guards.ratio_quantile": "guards.ratio_quantile=0.9",
    "guards.clip_budget": "guards.clip_budget=2",
    "guards.max_nonfinite_steps": "guards.max_nonfinite_steps=1",
    "guards.min_ess": "guards.min_ess=0.001",
    "guards.max_low_ess_steps": "guards.min_ess=0.001 guards.max_low_ess_steps=1",
    "watch.enabled": "watch.enabled=false",
    "watch.limits": "watch.limits={sync: 200, save: 300}",
    "watch.first_limit_s": "watch.first_limit_s=700",
    "reward_timeout_s": "reward_timeout_s=100",
    "checkpoint.save_every": "checkpoint.save_every=3",
    "checkpoint.keep": "checkpoint.keep=1",
    "checkpoint.stop_limit_s": "checkpoint.stop_limit_s=5",
    "checkpoint.async_save": "checkpoint.async_save=false",
    "checkpoint.snapshot_every": "checkpoint.save_every=2 checkpoint.snapshot_every=1",
    "diagnosis.save_tokens_every": "diagnosis.save_tokens_every=0",
    "diagnosis.max_tokens": "diagnosis.max_tokens=40",
    "diagnosis.decompose_every": "diagnosis.decompose_every=1",
    "diagnosis.decompose_layers": "diagnosis.decompose_layers=1",
    "diagnosis.capture_routes": "diagnosis.capture_routes=true",
    "logging.project": "logging.project=other",
    "logging.name": "logging.name=other",
    "logging.samples_per_step": "logging.samples_per_step=0",
    "logging.samples_every": "logging.samples_every=2",
    "profile": "profile.steps=[2] profile.engine=false profile.with_stack=true",
    "debug.save_rollouts": "debug.save_rollouts=true",
}
OTHER = {
    "train.micro_batch_tokens": "train.micro_batch_tokens=70",
    "train.logprob_chunk_tokens": "train.logprob_chunk_tokens=7",
    "train.share_prefixes": "train.share_prefixes=auto",
    "train.cpu_threads": "train.cpu_threads=2",
    "optimizer.use_distributed_optimizer": "optimizer.use_distributed_optimizer=true",
}
APART = "rollout.placement=disaggregated rollout.num_ranks=1"
RANKS = {
    "parallel.tensor_model_parallel_size": "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size": "parallel.pipeline_model_parallel_size=2",
    "parallel.context_parallel_size": "parallel.context_parallel_size=2",
    "parallel.expert_model_parallel_size": "parallel.expert_model_parallel_size=2",
    "parallel.moe_token_dispatcher_type": "parallel.moe_token_dispatcher_type=allgather",
    "rollout.placement": APART,
    "async.worker_timeout_s": f"{APART} async.worker_timeout_s=30",
    "rollout.weight_encoding": f"{APART} rollout.weight_encoding=delta",
    "rollout.full_sync_every": f"{APART} rollout.weight_encoding=delta rollout.full_sync_every=2",
}
ELSEWHERE = {
    "train.num_steps": "every case here changes it",
    "output_dir": "every case here resumes in another folder",
    "parallel": "the layouts of tests/loop/test_elastic.py and of make layouts",
    "rollout.num_ranks": "with rollout.placement",
    "rollout.tensor_parallel_size": "tests/rollout/conformance; batch_invariant excludes it",
    "rollout.expert_parallel_size": "tests/rollout/conformance; batch_invariant excludes it",
    "rollout.data_parallel_attention_size": "tests/rollout/conformance",
    "async.max_worker_restarts": "tests/disaggregated/test_restarts.py",
    "environment": "tests/environments; the run here has none",
    "logging": "trackers need their packages: tests/trackers",
    "checkpoint.snapshot_folder": "with checkpoint.snapshot_every; a folder of the node's",
    "megatron": "tests/loop/test_megatron_options.py",
}
NUM_GROUPS = 7
"""Runs over which the changes of `SAME` are spread, by chance; each changes several keys at once."""


def test_no_free_key_is_missing() -> None:
    """A key that becomes free gets a change here, or the name of the test that has one."""
    known = {*SAME, *OTHER, *RANKS, *ELSEWHERE}
    leaves = [k for k in all_keys() if not any(o.startswith(f"{k}.") for o in all_keys())]
    free = [key for key in leaves if rule_of(key).kind is Kind.FREE]
    free += [key for rule in RULES if rule.kind is Kind.FREE for key in rule.keys]
    missing = [
        key for key in free if not any(is_in(key, name) or is_in(name, key) for name in known)
    ]
    assert not missing


def test_each_change_is_one_that_is_free(tmp_path: Path) -> None:
    """The recipe takes it, its key really changes, and nothing in it wants --allow."""

    def flat(change: list[str]) -> dict[str, Any]:
        places = [f"model.path={tmp_path}", f"output_dir={tmp_path}"]
        recipe = load_recipe(TOY_RECIPE, [*places, *BASE, *change])
        return flatten(recipe.model_dump(mode="json", by_alias=True))

    before = flat([])
    for key, change in {**SAME, **OTHER, **RANKS}.items():
        found = find_changes(before, flat(words_of(change)), {}, {})
        assert any(is_in(each.key, key) for each in found), key
        assert [str(each) for each in found if each.kind is not Kind.FREE] == [], key


def words_of(change: str) -> list[str]:
    """Split `a=1 b={c: d}` into overrides."""
    words: list[str] = []
    for word in change.split():
        if "=" in word and word[0].isalpha():
            words.append(word)
        else:
            words[-1] += f" {word}"
    return words


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("base")
    write_toy_model(folder / "model")
    words = [f"model.path={folder / 'model'}", f"output_dir={folder / 'run'}", *BASE]
    finish(["train", str(TOY_RECIPE), *words], folder / "run.log")
    return folder / "run"


@pytest.fixture(scope="module")
def unchanged(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resumed(base, tmp_path_factory.mktemp("unchanged") / "run", [])


def finish(words: list[str], log: Path, ranks: int = 1) -> None:
    launcher = ["-m", "mrl.launch", "--standalone", f"--nproc-per-node={ranks}"] * (ranks > 1)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, "-m", "mrl", *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    log.write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (words, log.read_text()[-3000:])


def resumed(base: Path, run: Path, changes: list[str], ranks: int = 1) -> Path:
    """Copy the run and train it for two more steps with the changes; return the copy."""
    shutil.copytree(base, run)
    finish(["train", str(run), LONGER, *changes], run.with_suffix(".log"), ranks)
    rows = RunFolder(run).read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    return run


def groups() -> list[list[str]]:
    """Spread the changes by chance over runs; what sets one key in two ways is in two of them."""
    keys = list(SAME)
    random.Random(0).shuffle(keys)
    made: list[list[str]] = [[] for _ in range(NUM_GROUPS)]
    for number, key in enumerate(keys):
        mine = {word.partition("=")[0] for word in words_of(SAME[key])}
        order = made[number % NUM_GROUPS :] + made[: number % NUM_GROUPS]
        free = [each for each in order if not mine & {w.partition("=")[0] for w in all_words(each)}]
        free[0].append(key)
    return made


def all_words(keys: list[str]) -> list[str]:
    return [word for key in keys for word in words_of(SAME[key])]


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("keys", groups(), ids=lambda keys: keys[0])
def test_changes_that_move_no_bit(
    keys: list[str], base: Path, unchanged: Path, tmp_path: Path
) -> None:
    run = resumed(base, tmp_path / "run", all_words(keys))
    for step in (2, 3):
        ours, theirs = (
            RunFolder(each).rollouts / f"step_{step:06d}.jsonl" for each in (run, unchanged)
        )
        assert ours.read_bytes() == theirs.read_bytes(), keys
    for mine, other in zip(
        *(RunFolder(each).read_metrics() for each in (run, unchanged)), strict=True
    ):
        for name in ("loss/total", "grad_norm", "reward/mean", "entropy"):
            assert mine.get(name) == other.get(name), (keys, name)


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("key", [*OTHER, *RANKS])
def test_changes_that_move_last_bits(key: str, base: Path, unchanged: Path, tmp_path: Path) -> None:
    """The same prompts are trained on, and the first step's rewards and gradient are alike."""
    change = {**OTHER, **RANKS}[key]
    run = resumed(base, tmp_path / "run", words_of(change), ranks=2 if key in RANKS else 1)
    for step in (2, 3):
        prompts = [
            sorted(line["prompt_id"] for line in RunFolder(each).read_rollouts(step))
            for each in (run, unchanged)
        ]
        assert prompts[0] == prompts[1]
    mine, other = (RunFolder(each).read_metrics()[2] for each in (run, unchanged))
    assert mine["reward/mean"] == pytest.approx(other["reward/mean"], abs=0.15)
    assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.5)
