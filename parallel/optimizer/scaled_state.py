"""Read and write optimizer state that TransformerEngine's FusedAdam keeps in less than fp32 precision
(`use_precision_aware_optimizer`).

FusedAdam keeps main parameters as fp32, as fp16 with a scale, or as the 16 bits that the bf16
weights lack, and moments as fp32, bf16, fp16 with a scale or fp8 with a scale. Checkpoints hold
fp32 values, so that any run can load them: this module reads the state as fp32 on the host, and
writes it back. bf16 moments and 16-bit remainders survive this bit for bit. Values with a scale get
a new scale, which is computed from the largest value.

TransformerEngine runs only on GPUs, and this module has not run there. The tests use a stand-in with
FusedAdam's interface (`get_unscaled_state`, `set_scaled_state`, `initialize_state` of
transformer_engine/pytorch/optimizers/fused_adam.py). The bits of the remainders follow FusedAdam's
kernel (`AdamFunctorMasterParamRemainder` in transformer_engine/common/multi_tensor/adam.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "main": "master_param"}
"""Maps mrl's name of a tensor to FusedAdam's name."""


def is_kept_by(adam: Any) -> bool:
    """Return whether `adam` is a FusedAdam that holds the main parameters itself."""
    return bool(getattr(adam, "master_weights", False)) and hasattr(adam, "get_unscaled_state")


def read(adam: Any, weight: Tensor) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Return the optimizer state of a bf16 weight, and a function that writes the returned tensors
    back to the optimizer.

    The state is `exp_avg`, `exp_avg_sq` and `main`, as fp32 copies on the host. It is created if no
    step has created it yet.
    """
    remainders = bool(getattr(adam, "store_param_remainders", False))
    if not adam.state[weight]:
        adam.initialize_state(weight, remainders)
    tensors = {}
    for ours, theirs in NAMES.items():
        if ours == "main" and remainders:
            value = join_remainder(weight.detach(), adam.state[weight][theirs])
        else:
            value = adam.get_unscaled_state(weight, theirs).float()
        tensors[ours] = value.to("cpu", copy=True)

    def put_back() -> None:
        for ours, theirs in NAMES.items():
            value = tensors[ours].to(weight.device)
            if ours == "main" and remainders:
                rounded, value = split_remainder(value)
                weight.detach().copy_(rounded)
            adam.set_scaled_state(weight, theirs, value)

    return tensors, put_back


def join_remainder(weight: Tensor, remainder: Tensor) -> Tensor:
    """Join a bf16 weight and its remainder (int16, the lower 16 bits) to fp32.

    A negative remainder means that the weight was rounded up.
    """
    high = weight.view(torch.int16) - (remainder < 0).to(torch.int16)
    low = remainder.to(torch.int32) & 0xFFFF
    return ((high.to(torch.int32) << 16) | low).view(torch.float32)


def split_remainder(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into (bf16, int16): the exact inverse of `join_remainder`."""
    bits = value.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)  # wraps: 0x8000 and above become negative
    high = (bits >> 16).to(torch.int16) + (low < 0).to(torch.int16)
    return high.view(torch.bfloat16), low
