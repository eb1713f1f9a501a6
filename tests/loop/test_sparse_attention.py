"""A step of DeepSeek-V3.2 on saved rollouts: which passes record the indexers' keys, and which replay
them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config import load_recipe
from mrl.preflight import check
from mrl.run.folder import RunFolder, saved_step
from mrl.run.rollouts import save_groups
from mrl.toy_model import build_tokenizer
from mrl.types import Prompt, SampleGroup
from parallel.forward import PipelineRunner
from parallel.mesh import init_mesh
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks

TWO_UPDATES = ("train.num_steps=1", "train.num_steps_per_rollout=2", "algorithm.kl_coef=0.1")
QUIET = ("diagnosis.save_tokens_every=0", "diagnosis.decompose_every=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("sparse") / "model"
    tokenizer = build_tokenizer()
    write_tiny(
        "deepseek_v32", folder, vocab_size=128, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return Toy(folder)


def groups(model: Path) -> list[SampleGroup]:
    """Four prompts with four samples each, with random tokens and random routes."""
    drawn = tiny_samples(model, [25, 18, 21, 16] * 4)
    found = []
    for number in range(4):
        samples = [
            dataclasses.replace(sample, group_id=number)
            for sample in drawn[4 * number : 4 * number + 4]
        ]
        ids = samples[0].token_ids[:3]
        samples = [
            dataclasses.replace(s, token_ids=torch.cat([ids, s.token_ids[3:]])) for s in samples
        ]
        prompt = Prompt(str(number), ids, "abc", {}, f"file:{number}")
        found.append(SampleGroup(prompt, samples, torch.tensor([0.0, 1.0, 0.5, 0.2])))
    return found


def steps(toy: Toy, scratch: Path) -> dict[str, Any]:
    """For each mode the passes of a step: (whether it trains, records and replays keys), and
    metrics."""
    from mrl.trainer import Trainer

    passes: list[tuple[bool, bool, bool]] = []
    run = PipelineRunner.run

    def noted(
        self: Any, batches: Any, loss: Any = None, replay: Any = None, *more: Any, **named: Any
    ) -> Any:
        output = run(self, batches, loss, replay, *more, **named)
        keys = any(bool(each) for each in replay.keys)
        passes.append((loss is not None, any(map(bool, output.chosen_keys)), keys))
        return output

    PipelineRunner.run = noted  # in this process only, which ends with the test
    found, mesh = {}, None
    for mode in ("r3", "r2", "off"):
        folder = scratch / mode / "rollouts"
        folder.mkdir(parents=True)
        save_groups(saved_step(folder, 0), groups(toy.model))
        more = (f"debug.load_rollouts={folder}", f"moe.routing_replay={mode}")
        recipe = load_recipe(
            TOY_RECIPE, toy.overrides(scratch / mode / "run", *TWO_UPDATES, *QUIET, *more)
        )
        plan = check(recipe, 1, saved_steps=range(1))
        run_folder = RunFolder(recipe.output_dir)
        run_folder.open(recipe)
        mesh = mesh or init_mesh(plan.dims, recipe.seed)
        metrics = Trainer(plan, mesh, run_folder).run_step()
        found[mode] = {"passes": list(passes), "grad_norm": metrics["grad_norm"]}
        passes.clear()
    return found


@pytest.mark.timeout(300)
def test_the_pass_before_the_update_records_keys_and_the_others_replay_them(
    model: Toy, tmp_path: Path
) -> None:
    (found,) = run_ranks(1, steps, model, tmp_path / "runs", folder=tmp_path / "out")
    before, reference, update = (False, True, False), (False, False, True), (True, False, True)
    for mode in ("r2", "r3"):
        assert found[mode]["passes"] == [before, reference, update, update], mode
    without = [(trains, False, False) for trains in (False, False, True, True)]
    assert found["off"]["passes"] == without
    assert all(each["grad_norm"] > 0 for each in found.values())
