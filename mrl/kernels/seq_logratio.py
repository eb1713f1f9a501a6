"""`mrl::seq_logratio`: sum the log-ratios of each sequence's loss tokens.

Dimensions: N packed tokens, B packed sequences. The kernel is in csrc/policy_loss.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend


def seq_logratio(
    logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return f64[B, 2]: each sequence's sum of `logprobs - old_logprobs`, and number of loss tokens.

    The sum runs over the loss tokens of the sequence. The sum divided by the number is the log of
    GSPO's ratio (arXiv 2507.18071 eq. 7). The result has no gradient.

    Under context parallelism each rank has a part of every sequence. Sum the results over these
    ranks (16 bytes per sequence) and pass them to `policy_loss` as `seq_logratio`.

    Args:
        logprobs: f32[N].
        old_logprobs: f32[N].
        loss_mask: bool[N] or u8[N], true for the loss tokens.
        cu_seqlens: i32[B+1], non-decreasing from 0 to N.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. On GPUs bad values in
            `cu_seqlens` abort the kernel with an assertion instead.
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
