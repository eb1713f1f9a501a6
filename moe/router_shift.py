"""How far an update has moved the routers, token by token: the router shift of RSPO.

arXiv 2510.23027 compares the router that is being trained with the router before the update, at the
experts that were active before it. With r(e) the softmax of a router's logits over all experts,

    shift = 1/L sum over layers of 1/K sum over those K experts of |log r(e) - log r_old(e)|

and the paper's router-shift ratio is exp(-shift) (`mrl.algorithms.router_shift`). Experts that are
replayed count as active. The shift is taken at the token whose log-prob it weighs: the log-prob of
token t comes from the row of token t - 1.

Dimensions: n rows (tokens) of this rank, N packed tokens (n = N), L MoE layers, K experts per token,
E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.replay import LayerReplay, ReplayedChunk
from moe.routes import RouterScores


def router_scores(chunk: ReplayedChunk) -> RouterScores:
    """Return the experts that the chunk's routers used in the current forward pass, and their
    scores. Call it before `end_forward`, in a pass that keeps scores."""
    ids, logprobs = [], []
    for layer, all_logprobs in _logprobs(chunk):
        assert layer.chosen is not None
        ids.append(layer.chosen.detach())
        logprobs.append(all_logprobs.gather(1, layer.chosen))
    return RouterScores(torch.stack(ids, 1).short(), torch.stack(logprobs, 1))


def router_shift(chunk: ReplayedChunk, old: RouterScores) -> Tensor:
    """Return f32[n], without gradient: the shift of the chunk's routers, in the current forward pass,
    since the pass that returned `old` for the same rows. The first row is 0: no token precedes it.

    Raises ValueError if `old` has other rows or layers.
    """
    shifts = []
    for place, (_, logprobs) in enumerate(_logprobs(chunk)):
        if old.ids.shape[:2] != (len(logprobs), len(chunk.layers)):
            raise ValueError(
                f"router shift: the pass has {len(logprobs)} rows and {len(chunk.layers)} layers, the "
                f"scores before the update have {tuple(old.ids.shape[:2])}"
            )
        now = logprobs.gather(1, old.ids[:, place].long())
        shifts.append((now - old.logprobs[:, place]).abs().mean(1))
    rows = torch.stack(shifts).mean(0)
    return torch.cat([rows.new_zeros(1), rows[:-1]])


def _logprobs(chunk: ReplayedChunk) -> Iterator[tuple[LayerReplay, Tensor]]:
    """Yield each layer with the logarithm f32[n, E] of its router's softmax. The scores of a router are
    its logits, or their softmax, whose logarithm differs from them by a constant in each row."""
    for layer in chunk.layers.values():
        assert layer.scores is not None
        scores = layer.scores.float()
        if layer.scores_are_probabilities:
            scores = scores.clamp(min=torch.finfo(torch.float32).tiny).log()
        yield layer, scores.log_softmax(-1)
