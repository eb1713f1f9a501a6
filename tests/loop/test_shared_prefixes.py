"""`train.share_prefixes` on the rollouts of a real engine: the same steps with fewer rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.cli import main
from mrl.config import TrainConfig, load_recipe
from mrl.learn.packs import shares_prefixes
from mrl.planner.shape import read_shape
from mrl.preflight.prefixes import describe_prefixes
from mrl.shared_prefixes import expected_gain
from parallel.dims import ModelSizes
from parallel.hf_config import read_config
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.loop.test_guards import made_trainer
from tests.loop.test_old_logprobs import settings, without_times
from tests.ranks import run_ranks
from tests.release import release

STEPS = 3
EPSILON = "optimizer.adam_eps=1e-4"
"""Larger than usual: Adam's first steps would otherwise be the signs of rounding noise around 0."""
SHARED = "train/shared_tokens"
PP2 = "parallel.pipeline_model_parallel_size=2"


def trained(overrides: list[str]) -> dict[str, Any]:
    """Train on saved rollouts -> the metrics of each step, and the weights."""
    trainer = made_trainer(overrides)
    rows = [trainer.run_step() for _ in range(STEPS)]
    weights = [p.detach().clone() for c in trainer.policy.chunks for p in c.parameters()]
    return {"rows": rows, "weights": weights}


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (1, ("algorithm.kl_coef=0.1",)),
        release(1, ("algorithm.name=ppo", "moe.routing_replay=r2")),
        release(2, (PP2, "train.num_steps_per_rollout=2")),
        release(2, ("moe.load_balancing_type=seq_aux_loss", "moe.aux_loss_coeff=0.01")),
    ],
)
def test_the_steps_are_the_same(
    world: int, more: tuple[str, ...], toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    off, auto = (
        run_ranks(
            world,
            trained,
            settings(
                toy, recorded, tmp_path / kind, *more, f"train.share_prefixes={kind}", EPSILON
            ),
            folder=tmp_path / "out",
        )
        for kind in ("off", "auto")
    )
    for plain, ours in zip(off, auto, strict=True):
        for one, other in zip(plain["rows"], ours["rows"], strict=True):
            assert SHARED not in one
            assert 0.2 * one["tokens/train"] < other.pop(SHARED) < one["tokens/train"]
            expected, found = without_times(one), without_times(other)
            assert found.keys() == expected.keys()
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
        for a, b in zip(plain["weights"], ours["weights"], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_layers_that_share_nothing_are_named_once() -> None:
    """TransformerEngine's attention takes whole sequences, and so does linear attention."""

    def model(implementation: str, key_heads: int = 0) -> SimpleNamespace:
        sizes = ModelSizes(1, 1, 1, 1, 1, 0, linear_key_heads=key_heads)
        architecture = SimpleNamespace(num_trained_mtp=0)
        setup = SimpleNamespace(model=SimpleNamespace(sizes=sizes, architecture=architecture))
        return SimpleNamespace(base=SimpleNamespace(implementation=implementation, setup=setup))

    local, engine, linear = model("local"), model("transformer_engine"), model("local", 2)
    warned: list[str] = []
    for kind, models, expected in (
        ("off", [local, engine], False),
        ("auto", [local], True),
        ("auto", [local, engine], False),
        ("auto", [local, linear], False),
    ):
        config = TrainConfig.model_validate({"share_prefixes": kind})
        assert shares_prefixes(config, models, warned.append) == expected  # type: ignore[arg-type]
    text, of_linear = warned
    assert "state of linear attention" in of_linear
    assert "TransformerEngine" in text
    assert "model.transformer_impl" in text


def test_yaml_reads_off_as_false(toy: Toy, tmp_path: Path) -> None:
    recipe = load_recipe(TOY_RECIPE, toy.overrides(tmp_path, "train={share_prefixes: off}"))
    assert recipe.train.share_prefixes == "off"


def test_the_plan_says_what_it_saves(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected_gain(2048, 256, 8) == pytest.approx(8 * 2304 / (2047 + 8 * 257))
    assert expected_gain(200, 4000, 1) == 1
    words = toy.overrides(tmp_path / "run")
    main(["check", str(TOY_RECIPE), *words])
    assert "prefixes" not in capsys.readouterr().out
    main(["check", str(TOY_RECIPE), *words, "train.share_prefixes=auto"])
    assert "fewer FLOPs" in capsys.readouterr().out
    recipe = load_recipe(TOY_RECIPE, [*words, "train.share_prefixes=auto"])
    shape = read_shape(read_config(Path(recipe.model.path)))
    text = describe_prefixes(recipe, [], shape, elsewhere=True)
    assert "only with mrl's own layers" in text
