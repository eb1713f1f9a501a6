"""`mrl::seq_logratio`: log-ratios summed over each sequence.

Dimensions: N packed tokens, B packed sequences. The kernel is in csrc/policy_loss.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend


def seq_logratio(
    logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return f64[B, 2]: the sum of `logp - old` over each sequence's loss tokens, and their number.

    The result has no gradient. The sum divided by the number is the log of GSPO's ratio (arXiv
    2507.18071 eq. 7). Under context parallelism each rank has a part of every sequence. The
    results, summed over these ranks (16 bytes per sequence), are the argument of
    `policy_loss(seq_logratio=...)`.

    Args:
        logprobs: f32[N].
        old_logprobs: f32[N].
        loss_mask: bool[N] or u8[N].
        cu_seqlens: i32[B+1], non-decreasing from 0 to N.

    Raises:
        ValueError: names the argument, what was given and what was expected. On GPUs bad values in
            `cu_seqlens` abort the kernel with an assertion.
    """
    return torch.ops.mrl.seq_logratio(
        logprobs.detach(), old_logprobs.detach(), loss_mask, cu_seqlens
    )


torch.library.define(
    "mrl::seq_logratio",
    "(Tensor logprobs, Tensor old_logprobs, Tensor loss_mask, Tensor cu_seqlens) -> Tensor",
)


def _check(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    num_tokens, num_sequences = backend.check_packed(logprobs, loss_mask, cu_seqlens, "logprobs")
    legend = f"N = {num_tokens} tokens, B = {num_sequences} sequences"
    dtypes = (torch.float32,)
    backend.check_tensor(
        "old_logprobs", old_logprobs, (num_tokens,), dtypes, logprobs.device, legend
    )
    return logprobs.new_empty((num_sequences, 2), dtype=torch.float64)


@torch.library.impl("mrl::seq_logratio", ("cpu", "cuda"))
def _run(*arguments: Tensor) -> Tensor:
    sums = _check(*arguments)
    logprobs, old_logprobs, loss_mask, cu_seqlens = (t.contiguous() for t in arguments)
    num_tokens, num_sequences = logprobs.numel(), len(sums)
    backend.run(
        "seq_logratio",
        logprobs.device,
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        workspace=backend.workspace("policy_loss", logprobs.device, num_tokens, num_sequences),
        sums=sums,
    )
    return sums


torch.library.register_fake("mrl::seq_logratio")(_check)
