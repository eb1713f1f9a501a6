"""Keep gradients in host memory between the passes that compute them and the optimizer step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import NotFinite
from parallel.ledger import gradient_tensors
from parallel.megatron_model import MegatronModel


class KeptGradients:
    """Keeps, in host memory, the sum of the gradients that several passes of one model computed.

    The model's own buffers hold gradients only until the next pass, or until another policy is
    mounted. Gradients are added after their reduction over ranks. So the sum for a single pass
    is equal to the buffers bit for bit.
    """

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._sums: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._sums)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of host memory that the sums take on this rank."""
        return sum(each.nbytes for each in self._sums)

    def add(self) -> None:
        """Add the gradients that the latest pass left in the buffers."""
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
        """Copy the sums into the model's gradient buffers, for an optimizer step."""
        self._model.zero_gradients()
        buffers = gradient_tensors(self._model.chunks)
        with torch.no_grad():
            for buffer, total in zip(buffers, self._sums, strict=True):
                buffer.copy_(total)
        for chunk in self._model.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # A swap of policies gathered the weights; the step changes them, so gather again.
                group.param_gather_dispatched = False

    def require_finite(self) -> None:
        """Raise NotFinite on all ranks if the norm of the sums is not finite in float32, in which the
        optimizer computes it. A collective.

        The gradients of each pass are finite, but their sum may not be. Megatron would scale such a sum
        to 0 and take the step.
        """
        mesh = self._model.mesh
        own = sum((each.double().square().sum() for each in self._sums), torch.zeros(()).double())
        total = own.to(mesh.device)
        if mesh.dims.world > 1:
            dist.all_reduce(total)  # of copies, too: an upper bound
        if not total <= torch.finfo(torch.float32).max:
            raise NotFinite(
                "the sum of the gradients since the last optimizer step is too large and dropped: its "
                f"norm is about {float(total.sqrt()):.3g}; give smaller weights or advantages"
            )

    def clear(self) -> None:
        """Forget all sums."""
        self._sums = []
