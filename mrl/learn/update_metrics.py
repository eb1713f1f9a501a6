"""Reduce the statistics of a rollout's passes and optimizer steps to metrics over all ranks.

Every public function is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mrl.config import MoeConfig
from mrl.diagnosis.mismatch import effective_share, mismatch_statistics
from mrl.types import MicroBatch, Statistics
from parallel.megatron_model import StepOutput
from parallel.mesh import Mesh
from parallel.pass_output import PassOutput
from parallel.reduce import merge, reduce_statistics

COVERAGES = ("routing/replay_coverage", "routing/captured_coverage")
_NO_UPDATE = {"loss/policy": math.nan, "loss/total": math.nan, "grad_norm": 0.0, "lr": 0.0}


def policy_metrics(
    step: int,
    batches: Sequence[MicroBatch],
    before: PassOutput | None,
    steps: Sequence[StepOutput],
    mesh: Mesh,
    moe: MoeConfig,
    num_moe_layers: int,
) -> dict[str, float]:
    """Return the losses, `routing/*`, `mismatch/*`, `grad_norm` and `lr` of step `step`.

    batches: the micro-batches of the step, beginning with the first one that `before` covers.
    before: the output of a pass with the weights from before the update. The pass is a separate
    pass over all of `batches`, or the training pass over the first of them. None if there was no
    pass, because no token is in the loss.
    steps: the policy's optimizer steps; if only the critic was trained or all steps were skipped,
    this is empty, the losses are NaN, and `grad_norm` and `lr` are 0.
    """
    if before is None:
        return dict(_NO_UPDATE)
    trained = merge([one.stats for one in steps])
    # Disagreement is measured before the update, coverage in every pass.
    early = {k: v for k, v in before.routing.items() if k not in COVERAGES}
    late = {k: v for k, v in trained.items() if k in COVERAGES or k not in early}
    coverage = merge([_only_coverage(before.routing), _only_coverage(late)])
    mismatch = mismatch_statistics(batches, before, step) if mesh.reports_loss else {}
    metrics = reduce_statistics({**late, **early, **coverage, **mismatch})
    metrics |= effective_share(metrics)
    if not steps:
        return {**metrics, **_NO_UPDATE}
    metrics["loss/policy"] /= len(steps)
    return {
        **metrics,
        "loss/total": metrics["loss/policy"] + _router_loss(metrics, moe, num_moe_layers),
        "grad_norm": _mean_grad_norm(steps),
        "lr": steps[-1].lr,
    }


def value_metrics(steps: Sequence[StepOutput]) -> dict[str, float]:
    """Return `value/*` and `loss/value` of the critic's optimizer steps; {} without a step."""
    if not steps:
        return {}
    metrics = reduce_statistics(merge([step.stats for step in steps]))
    metrics["loss/value"] /= len(steps)
    return {**metrics, "value/grad_norm": _mean_grad_norm(steps), "value/lr": steps[-1].lr}


def _only_coverage(statistics: Statistics) -> Statistics:
    return {key: value for key, value in statistics.items() if key in COVERAGES}


def _mean_grad_norm(steps: Sequence[StepOutput]) -> float:
    return math.fsum(step.grad_norm for step in steps) / len(steps)


def _router_loss(metrics: dict[str, float], moe: MoeConfig, num_moe_layers: int) -> float:
    """Return the sum of the load-balancing loss and the router z-loss over the MoE layers, each
    loss multiplied by its coefficient."""
    aux = moe.aux_loss_coeff * metrics.get("moe/aux_loss", 0.0)
    z = moe.z_loss_coeff * metrics.get("moe/z_loss", 0.0)
    return (aux + z) * num_moe_layers
