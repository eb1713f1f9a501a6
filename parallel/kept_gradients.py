"""Gradients that are kept between the passes that computed them and an optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.ledger import gradient_tensors
from parallel.megatron_model import MegatronModel


class KeptGradients:
    """Sums the gradients of several passes of one model in the host's memory.

    The model's own buffers hold them only until the next pass, or until another policy is mounted.
    What is added is already summed over ranks, so a sum of one pass has the bits of its buffers.
    """

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._sums: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._sums)

    @property
    def num_bytes(self) -> int:
        """The host memory that they take on this rank."""
        return sum(each.nbytes for each in self._sums)

    def add(self) -> None:
        """Add what the newest pass has left in the buffers."""
        self._model.require_state()
        found = [
            each.detach().to("cpu", copy=True) for each in gradient_tensors(self._model.chunks)
        ]
        if self._sums:
            for total, own in zip(self._sums, found, strict=True):
                total.add_(own)
        else:
            self._sums = found

    def put_back(self) -> None:
        """Fill the buffers with the sums, for an optimizer step."""
        self._model.zero_gradients()
        buffers = gradient_tensors(self._model.chunks)
        with torch.no_grad():
            for buffer, total in zip(buffers, self._sums, strict=True):
                buffer.copy_(total)
        for chunk in self._model.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # A swap has gathered the weights, and those after the step are others.
                group.param_gather_dispatched = False

    def clear(self) -> None:
        """Forget all sums."""
        self._sums = []
