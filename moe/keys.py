"""Replay the keys that the indexer of a sparse attention chose: in the forward pass, and again in
activation recompute.

An indexer (`parallel.layers.indexer`) chooses the keys that a query sees, as a router chooses experts.
A choice changes when the weights or the order of sums change, and the log-probs with it. So a training
pass can replay the choices of the pass that computed the old log-probs, or those of an engine.

A choice is a tensor of positions [n, K] of keys, each counted from the start of the query's sequence.
A row of NO_KEYS has no choice: either the query sees all keys up to its own, because they are at most
K, or the indexer chooses.

Dimensions: n rows (tokens) of this rank, N packed tokens, T tokens of a sample, L layers, K keys per
query (`index_topk`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
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


def decode_keys(numbers: np.ndarray, *, num_tokens: int, num_layers: int, topk: int) -> Tensor:
    """Return the choices i32[T-1, L, K] of a sample from the numbers that an engine sent for it.

    numbers: the flat int32 array that SGLang returns as `indexer_topk` with
    `--enable-return-indexer-topk`: [T-1, L, K] in C order, -1 where there are fewer keys than K.

    Raises ValueError for a wrong count, a position that is not one of the keys up to the query's own, a
    repeated position, and a query that has fewer keys than it could.
    """
    rows = num_tokens - 1
    if numbers.size != rows * num_layers * topk:
        raise ValueError(
            f"keys of the indexer: got {numbers.size} numbers, expected {rows * num_layers * topk}: "
            f"{num_tokens} tokens less the last = {rows} rows x {num_layers} layers x top-{topk}"
        )
    keys = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32)).view(
        rows, num_layers, topk
    )
    position = torch.arange(rows).view(-1, 1)
    ordered = keys.sort(-1).values
    given = (ordered >= 0).sum(-1)
    for wrong, what in (
        (
            (keys < NO_KEYS).any(-1) | (ordered[..., -1] > position),
            "keys that come after the query",
        ),
        (
            ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1),
            "a key twice",
        ),
        (given != (position + 1).clamp(max=topk), "another number of keys than it has or can see"),
    ):
        if bool(wrong.any()):
            row, layer = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"keys of the indexer: the query at position {row} has {what} in layer {layer + 1}: "
                f"{keys[row, layer].tolist()!r:.80}"
            )
    return keys


def join_keys(
    parts: Sequence[Tensor | None],
    lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
) -> Tensor | None:
    """Return the choices i32[N, L, K] of a packed micro-batch; None if no sequence has any.

    parts: for each sequence its choices [T-1, L, K], or None. lengths: T of each sequence.
    padded_lengths: the number of rows that each occupies in the result; by default its length. The
    last token of a sequence, padding, and sequences without choices have rows of NO_KEYS. Raises
    ValueError for a part that does not have T-1 rows.
    """
    rooms = lengths if padded_lengths is None else padded_lengths
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    joined = first.new_full((sum(rooms), *first.shape[1:]), NO_KEYS)
    start = 0
    for part, length, room in zip(parts, lengths, rooms, strict=True):
        if part is not None:
            if len(part) != length - 1:
                raise ValueError(
                    f"keys of the indexer: got {len(part)} rows for {length} tokens, expected "
                    f"{length - 1}: the last token has none"
                )
            joined[start : start + length - 1] = part
        start += room
    return joined


def local_keys(keys: Tensor, owned_layers: Iterable[int], rows: slice) -> dict[int, Tensor]:
    """Return the choices that this rank replays, i32[n, K] for each layer in `owned_layers`, by layer
    number. `keys` [rows, L, K] are those of this context-parallel rank in all layers of the model, and
    `rows` selects those of this tensor-parallel rank (`moe.align.row_slice`)."""
    return {number: keys[rows, number - 1].contiguous() for number in owned_layers}
