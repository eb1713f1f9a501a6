"""Recipes of the unmodified tinker-cookbook against a service. The model is a toy under a name that the
cookbook knows, and the data sets are local folders with the names of those of the hub."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.tinker.keys import Keys
from tests.tinker.running import (
    LIMIT_S,
    needs_cookbook,
    sdk_environment,
    served,
    tinker_service,
)
from tests.tinker.taught import CONTEXT, text, write_taught_toy

pytestmark = [needs_cookbook, pytest.mark.timeout(1200), pytest.mark.release]

NAME = "Qwen/Qwen3-8B-Base"
CHAT, MATH, PREFERENCES = "HuggingFaceH4/no_robots", "openai/gsm8k", "Anthropic/hh-rlhf"
QUESTIONS, ENCYCLOPEDIA = "zwhe99/DeepMath-103K", "Salesforce/wikitext"
CARD = """---
configs:
- config_name: {name}
  data_files:
  - split: train
    path: {name}/train.jsonl
---
"""
NUMERICS = 1e-4
"""The bound for `optim/kl_sample_train_v1`, the mean of the engine's log-probs minus the trainer's."""
Rows = list[dict[str, Any]]
Recipe = Callable[..., Rows]


def write_rows(file: Path, rows: Rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_named(folder: Path, name: str, rows: Rows) -> None:
    """Write a data set with one configuration."""
    write_rows(folder / name / "train.jsonl", rows)
    (folder / "README.md").write_text(CARD.format(name=name))


def write_data(folder: Path) -> None:
    draw, talk = random.Random(0), "\n\nHuman: {}\n\nAssistant: {}"
    asked = [f"What is {a} + {b}?" for a in range(8) for b in range(8)]
    talks = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "yes, we know"}]
        for question in asked
    ]
    write_rows(folder / CHAT / "train.jsonl", [{"messages": talk} for talk in talks])
    sums = [(a, b) for a in range(3) for b in range(3)] * 2
    rows = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums]
    write_named(folder / MATH, "main", rows)
    pairs = [
        {"chosen": talk.format(question, "yes"), "rejected": talk.format(question, "Guess: 1")}
        for question in asked
    ]
    write_rows(folder / PREFERENCES / "train.jsonl", pairs[:48])
    tie = talk.format("yes", "yes")  # the recipe takes 1,024 rows to test on, and leaves out ties
    ties = [{"chosen": tie, "rejected": tie}] * 1020
    write_rows(folder / PREFERENCES / "test.jsonl", [*pairs[48:52], *ties])
    write_rows(folder / QUESTIONS / "train.jsonl", [{"question": each} for each in asked])
    lines = [{"text": text(draw, 200)} for _ in range(100)]
    write_named(folder / ENCYCLOPEDIA, "wikitext-103-raw-v1", lines)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, made_once: Callable[..., Path]) -> Path:
    """A folder in which the model and the data sets have the names by which the cookbook asks."""
    folder = tmp_path_factory.mktemp("cookbook")
    (folder / NAME).parent.mkdir(parents=True)
    (folder / NAME).symlink_to(made_once("taught_toy", write_taught_toy))
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def run(work: Path) -> Iterator[Recipe]:
    """A function that runs a recipe, and returns the rows of its metrics."""
    service = tinker_service(
        work,
        work / NAME,
        rollout={"batch_invariant": True, "context_len": CONTEXT, "max_total_tokens": 65536},
        lora={"max_rank": 32, "experts": ["per_expert"]},
        tenants={"max_number": 16},
    )
    own = sdk_environment(Keys(service.folder).add("ann"))
    nowhere = "http://127.0.0.1:9"  # so that no recipe fetches the price list of the hosted API
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "cache"),  # another run's data sets have the same names
        "HTTPS_PROXY": nowhere,
    }
    with served(service) as (url, _):

        def call(recipe: str, log: str, **keys: Any) -> Rows:
            folder = work / "logs" / log
            asked = {"model_name": NAME, "log_path": folder, **keys}
            words = [f"{key.replace('__', '.')}={value}" for key, value in asked.items()]
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{recipe}", *words],
                cwd=work, env={**own, **offline, "TINKER_BASE_URL": url}, capture_output=True,
                text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
            rows = [
                json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
            ]
            print(json.dumps({recipe: rows}))
            return rows

        yield call


def of(rows: Rows, name: str) -> list[float]:
    """Return one metric of the rows that have it."""
    return [row[name] for row in rows if name in row]


def test_sl_loop_is_resumed(run: Recipe, work: Path) -> None:
    keys = {
        "batch_size": 4, "max_length": 256, "save_every": 2, "learning_rate": 1e-3, "lora_rank": 8,
    }  # fmt: skip
    rows = run("sl_loop", "resumed", max_steps=3, **keys)
    saved = work / "logs" / "resumed" / "checkpoints.jsonl"
    first, *_ = saved.read_text().splitlines()
    assert json.loads(first)["batch"] == 2
    saved.write_text(first + "\n")  # as if the run had been stopped after its first checkpoint
    more = run("sl_loop", "resumed", max_steps=3, **keys)
    again, third = more[-1], rows[2]
    assert [again["progress"], again["train_mean_nll"]] == [
        third["progress"], third["train_mean_nll"],
    ]  # fmt: skip


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo", "stable_reinforce"])
def test_rl_loop(run: Recipe, loss: str) -> None:
    rows = run(
        "rl_loop", loss, loss_fn=loss, batch_size=8, group_size=16, max_tokens=20, max_steps=2,
        save_every=1, learning_rate=3e-3, lora_rank=8,
    )  # fmt: skip
    assert [row["progress/batch"] for row in rows] == [0, 1]
    assert all(0 <= row["reward/total"] <= 1 for row in rows)
    assert any(row["reward/total"] > 0 for row in rows)
    assert any(norm > 0 for norm in of(rows, "unclipped_grad_l2:mean"))  # a step was taken


def test_arithmetic(run: Recipe) -> None:
    """`math_rl` with its own environment, which needs no data."""
    rows = run(
        "math_rl.train", "arithmetic", env="arithmetic", renderer_name="role_colon", group_size=8,
        groups_per_batch=2, max_tokens=24, learning_rate=1e-3, max_steps=2, eval_every=0,
        save_every=0, lora_rank=8,
    )  # fmt: skip
    check_reinforced(rows, 2)


def check_reinforced(rows: Rows, steps: int) -> None:
    """Assert that training steps were taken, and that engine and trainer agree on the log-probs."""
    drift = of(rows, "optim/kl_sample_train_v1")
    assert len(drift) == steps
    assert all(abs(each) < NUMERICS for each in drift), drift
    assert all(each < NUMERICS**2 for each in of(rows, "optim/kl_sample_train_v2"))
    assert any(norm > 0 for norm in of(rows, "unclipped_grad_l2:mean"))


def test_a_game_of_many_turns(run: Recipe) -> None:
    rows = run(
        "multiplayer_rl.guess_number.train", "guess", renderer_name="role_colon", group_size=4,
        batch_size=1, max_tokens=24, learning_rate=1e-3, max_steps=1, eval_every=0, save_every=0,
    )  # fmt: skip
    check_reinforced(rows, 1)
    assert all(turns > 1 for turns in of(rows, "env/all/turns_per_episode"))


def test_rl_numerics_check(run: Recipe) -> None:
    """Long contexts. The toy ends each episode in its first turn."""
    rows = run(
        "rl_numerics_check.train", "numerics", renderer_name="qwen3_instruct", group_size=4,
        groups_per_batch=2, max_tokens=96, max_trajectory_tokens=CONTEXT - 96,
        task__num_pages_min=1, task__num_pages_max=2, task__page_chars=400,
        task__words="time,later", task__reward_tolerance=1.0, learning_rate=1e-3, max_steps=2,
        save_every=0, lora_rank=8,
    )  # fmt: skip
    check_reinforced(rows, 2)


def test_dpo(run: Recipe) -> None:
    rows = run(
        "preference.dpo.train", "dpo", dataset="hhh", renderer_name="role_colon", batch_size=4,
        max_length=512, learning_rate=3e-3, lr_schedule="constant", max_steps=4,
    )  # fmt: skip
    losses = of(rows, "dpo_loss")
    assert abs(losses[0] - 0.6931) < 1e-3  # the policy is the reference: log 2
    assert losses[-1] < losses[0]
    assert of(rows, "accuracy")[-1] == 1.0
    assert of(rows, "margin")[-1] > 0


def test_pairwise_preferences(run: Recipe) -> None:
    rows = run(
        "preference.shorter.train", "shorter", renderer_name="role_colon", batch_size=2,
        group_size=4, max_tokens=24, learning_rate=1e-3, max_steps=2, eval_every=0,
    )  # fmt: skip
    check_reinforced(rows, 2)
    assert len(of(rows, "kl_pre_post_v1")) == 2


def test_on_policy_distillation(run: Recipe, work: Path) -> None:
    """A student that begins at the base model learns from a teacher that `sl_loop` has trained."""
    run("sl_loop", "teacher", batch_size=8, max_length=256, max_steps=8, save_every=0,
        learning_rate=5e-3, lora_rank=8)  # fmt: skip
    last = (work / "logs" / "teacher" / "checkpoints.jsonl").read_text().splitlines()[-1]
    rows = run(
        "distillation.on_policy_distillation", "student", dataset="deepmath", teacher_model=NAME,
        teacher_checkpoint=json.loads(last)["sampler_path"], renderer_name="role_colon",
        group_size=4, groups_per_batch=4, max_tokens=16, learning_rate=1e-3, max_steps=4,
        eval_every=0, save_every=0, lora_rank=8,
    )  # fmt: skip
    apart = of(rows, "teacher_kl")
    assert apart[0] > 0
    assert min(apart[1:]) < apart[0]
    assert all(abs(each) < NUMERICS for each in of(rows, "optim/kl_sample_train_v1"))
