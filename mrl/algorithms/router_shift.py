"""The router-shift weight of RSPO (arXiv 2510.23027): trust a token less if the routers have moved.

The weight of a token is max(exp(-shift), floor), without gradient. It multiplies the importance ratio
before the ratio is clipped and, in an algorithm with one ratio per sequence, before the ratios of the
tokens are averaged. `moe.router_shift` defines the shift. RSPO applies the weight to GMPO; here it
works with every algorithm that clips as PPO does.

Dimensions: N packed tokens of a micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from mrl.types import Mean, MicroBatch, Statistics


def router_shift_weight(shift: Tensor, floor: float) -> Tensor:
    """Return the weight f32[N] of each token for its shift f32[N]."""
    return shift.detach().neg().exp().clamp(min=floor)


def log_router_shift_weight(batch: MicroBatch, floor: float) -> tuple[Tensor, Statistics]:
    """Return the logarithm f32[N] of each token's weight, and statistics of the loss tokens: the mean
    weight, and the share of tokens whose weight is `floor`.

    Raises ValueError if the batch has no shift.
    """
    if batch.router_shift is None:
        raise ValueError(
            "MicroBatch.router_shift: got None, expected f32[N] from the training pass; "
            "algorithm.router_shift_floor needs a MoE"
        )
    weight = router_shift_weight(batch.router_shift, floor)
    mask, count = batch.loss_mask, batch.loss_mask.sum().double()
    at_floor = (weight <= floor) & mask
    stats: Statistics = {
        "router_shift/mean": Mean(weight[mask].double().sum(), count),
        "router_shift/floor_share": Mean(at_floor.sum().double(), count),
    }
    return weight.log(), stats
