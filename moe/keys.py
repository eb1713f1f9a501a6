"""Replay the keys that the indexer of a sparse attention chose: in the forward pass, and again in
activation recompute.

An indexer (`parallel.layers.indexer`) chooses the keys that a query sees, as a router chooses experts.
A choice changes when the weights or the order of sums change, and the log-probs with it. So a training
pass can replay the choices of the pass that computed the old log-probs.

A choice is a tensor of positions [n, K] of keys, each counted from the start of the query's sequence.
A row of NO_KEYS has no choice: the query sees all keys up to its own, because they are at most K.

Dimensions: n rows (tokens) of this rank, K keys per query (`index_topk`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

NO_KEYS = -1
"""Position in rows without a choice."""
LARGEST_NARROW = torch.iinfo(torch.int16).max
"""The largest position that is recorded as int16."""
Keys = Mapping[int, Tensor]
"""Choices [n, K] of this rank's rows, by Megatron's 1-based layer number. In a layer that is missing,
the indexer chooses."""


class KeyReplay:
    """Replays choices in the indexer of one layer, and records them.

    The recomputes of the micro-batches must come in the order of their forward passes.
    """

    def __init__(self, keep_for_recompute: bool) -> None:
        self.recorded: Tensor | None = None
        """[n, K] on the CPU: the choice of the last forward pass, int16 where that suffices. None if
        the pass did not record, or if no sequence of its micro-batch was longer than K."""
        self._keep = keep_for_recompute
        self._target: Tensor | None = None
        self._in_forward = self._records = False
        self._recompute: deque[Tensor | None] = deque()

    def begin_forward(self, target: Tensor | None, with_grad: bool, records: bool = False) -> None:
        """Prepare the next forward pass.

        target: the choice [n, K] to replay; None lets the indexer choose. with_grad: whether a backward
        pass follows; if the model recomputes activations, `target` is kept for the recompute. records:
        whether to keep the choice of the pass in `recorded`.
        """
        self._target, self._in_forward, self._records = target, True, records
        self.recorded = None
        if self._keep and with_grad:
            self._recompute.append(target)

    def end_forward(self) -> None:
        """End the forward pass. Calls before the next `begin_forward` count as recomputes."""
        self._target, self._in_forward = None, False

    @property
    def num_pending(self) -> int:
        """The number of micro-batches whose recompute has not run yet."""
        return len(self._recompute)

    def next_target(self) -> Tensor | None:
        """Return the choice to replay in this pass or recompute. The indexer calls it once in each."""
        return self._target if self._in_forward else self._recompute.popleft()

    def record(self, chosen: Tensor, longest: int) -> None:
        """Take the choice [n, K] of this pass. `longest` is the length of the longest sequence."""
        if self._in_forward and self._records:
            dtype = torch.int16 if longest <= LARGEST_NARROW else torch.int32
            self.recorded = chosen.to("cpu", dtype)
