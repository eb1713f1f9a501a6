"""Log-probs and entropy of packed tokens from vocab-parallel logits.

N packed tokens, V vocabulary, V_loc this tensor-parallel rank's slice of it. All element math is
fp32 whatever the logits are: bf16 log-softmax alone can use up GSPO's whole clip budget.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _VocabParallelLogprob(torch.autograd.Function):
    """log softmax(x)[y] and its entropy; d logp / dx = 1[y] - softmax(x). Entropy has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        x = logits.float() / temperature
        top = x.amax(dim=-1)
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        x -= top.unsqueeze(-1)
        start = group.rank() * x.shape[-1]
        local = labels - start
        mine = (local >= 0) & (local < x.shape[-1])
        column = torch.where(mine, local, 0).unsqueeze(-1)
        target = torch.where(mine, x.gather(-1, column).squeeze(-1), 0.0)
        exp = x.exp()
        sums = torch.stack([exp.sum(-1), (exp * x).sum(-1), target])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, target = sums
        log_total = total.log()
        softmax = exp.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, column, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return target - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        softmax, column, mine = ctx.saved_tensors
        scale = grads[0] / ctx.temperature
        grad = softmax * -scale.unsqueeze(-1)
        grad.scatter_add_(-1, column, torch.where(mine, scale, 0.0).unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None


def packed_logprobs(
    logits: Tensor, input_ids: Tensor, cu_seqlens: Tensor, temperature: float, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token given those before it, and the entropy of its distribution.

    logits [N, V_loc] (row n predicts token n+1), input_ids i64[N], cu_seqlens i32[B+1] ->
    logprobs f32[N] (differentiable), entropy f32[N]; both 0 on the first token of each sequence.
    `temperature` is the sampling temperature, so that the numbers compare with the engine's.
    """
    logp, entropy = _VocabParallelLogprob.apply(logits, input_ids.roll(-1), temperature, group)
    first = torch.zeros_like(input_ids, dtype=torch.bool)
    starts = cu_seqlens[:-1].long()
    first[starts[starts < input_ids.numel()]] = True

    def shift(per_row: Tensor) -> Tensor:
        return torch.where(first, 0.0, per_row.roll(1))

    return shift(logp), shift(entropy)
