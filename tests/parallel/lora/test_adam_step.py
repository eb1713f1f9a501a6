"""Settings of Adam for one step give the bits of a recipe with these settings, and leave no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.config import OptimizerConfig
from mrl.errors import NotFinite
from mrl.types import Sample
from parallel.mesh import Mesh
from parallel.optimizer.adam_step import AdamStep
from parallel.policy import Policy
from tests.parallel.layouts import exported, join_mesh, loss, ready_batch
from tests.parallel.lora.tenants import TENANTS, differences, make, state
from tests.ranks import run_ranks

WANTED = OptimizerConfig(
    lr=3e-3, adam_beta1=0.7, adam_beta2=0.8, adam_eps=1e-4, weight_decay=0.1, clip_grad=0.02
)
OTHER = OptimizerConfig(lr=1e-3, weight_decay=0.01, clip_grad=0.0)
STEP = AdamStep(lr=3e-3, beta1=0.7, beta2=0.8, eps=1e-4, weight_decay=0.1, clip_grad=0.02)


def settings(policy: Policy) -> list[Any]:
    optimizer = policy.optimizer
    parts = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
    keys = ("lr", "betas", "eps", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in optimizer.param_groups]
    return [groups, [part.config.clip_grad for part in parts]]


def stepped(
    path: Path, mesh: Mesh, name: str, samples: list[Sample], *, plain: bool
) -> dict[str, Any]:
    """Two steps: by a recipe with these settings if `plain`, else by replacing another recipe's."""
    policy = make(name, path, mesh)
    before = exported(policy)
    distributed = TENANTS[name].optimizer.use_distributed_optimizer
    config = WANTED if plain else OTHER
    policy.make_optimizer(config.model_copy(update={"use_distributed_optimizer": distributed}))
    own, step = settings(policy), AdamStep() if plain else STEP
    found: dict[str, Any] = {"norms": []}
    for _ in range(2):
        batch, _ = ready_batch(policy, mesh, samples[TENANTS[name].samples])
        policy.compute_gradients(batch, loss, TENANTS[name].replay)
        found["norms"].append(policy.apply_gradients(step))
    left = {key: value for key, value in state(policy).items() if key != "schedule"}
    found |= {"state": left, "trace": differences(settings(policy), own)}
    found["moved"] = bool(differences(exported(policy), before))
    policy.optimizer.step = lambda: (False, None, None)
    with pytest.raises(NotFinite):
        policy.apply_gradients(STEP)
    found["trace"] += differences(settings(policy), own)
    policy.close()
    return found


def both(path: Path, name: str, samples: list[Sample]) -> list[dict[str, Any]]:
    mesh = join_mesh(path, {})
    return [stepped(path, mesh, name, samples, plain=plain) for plain in (True, False)]


@pytest.mark.parametrize("name", ["a", "c"])
def test_settings_of_a_step(
    name: str, model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    ((plain, replaced),) = run_ranks(1, both, model_path, name, samples, folder=tmp_path)
    assert plain["moved"]
    assert not plain["trace"]
    assert not replaced["trace"]
    del plain["trace"], replaced["trace"]
    assert not differences(replaced, plain)
