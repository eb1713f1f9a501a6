"""References of `moe_sort`, `moe_permute` and `moe_unpermute` that handle one expert choice at a time.

They take the expert ids of each token, ids [n, K], with -1 for an empty slot. Gradients are computed
by autograd.

Dimensions: n tokens, E experts, K slots for the experts of a token, m copies (one per slot that is
not empty), H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choices(ids: Tensor) -> list[tuple[int, int, int]]:
    """Return (expert, token, slot) of each expert choice in `ids`, sorted by expert, then by token.

    The i-th entry belongs to copy i.
    """
    found = [
        (expert, token, place)
        for token, row in enumerate(ids.tolist())
        for place, expert in enumerate(row)
        if expert >= 0
    ]
    return sorted(found)


def moe_sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `mrl.kernels.ExpertOrder` for ids [n, K].

    They are tokens i64[m], cells i64[m], copies i64[n, K] and counts i64[E].
    """
    tokens, cells = [], []
    copies = torch.full(ids.shape, -1)
    counts = torch.zeros(num_experts, dtype=torch.int64)
    for copy, (expert, token, place) in enumerate(choices(ids)):
        tokens.append(token)
        cells.append(token * num_experts + expert)
        copies[token, place] = copy
        counts[expert] += 1
    return torch.tensor(tokens).long(), torch.tensor(cells).long(), copies, counts


def moe_permute(rows: Tensor, ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Copy each token's row once per chosen expert; return the copies f64[m, H] and values f64[m].

    The values are those of the table for the token and expert of each copy. rows: [n, H]. table:
    [n, E].
    """
    rows, table = rows.double(), table.double()
    copied = [rows[token] for _, token, _ in choices(ids)]
    values = [table[token, expert] for expert, token, _ in choices(ids)]
    if not copied:
        return rows[:0], table.reshape(-1)[:0]
    return torch.stack(copied), torch.stack(values)


def moe_unpermute(rows: Tensor, ids: Tensor, gates: Tensor | None = None) -> Tensor:
    """Return f64[n, H]: the sum of the rows [m, H] of each token's copies.

    If `gates` [m] are given, each row is first multiplied by its gate.
    """
    rows = rows.double() if gates is None else rows.double() * gates.double().unsqueeze(1)
    sums = [torch.zeros(rows.shape[1], dtype=torch.float64) for _ in range(len(ids))]
    for copy, (_, token, _) in enumerate(choices(ids)):
        sums[token] = sums[token] + rows[copy]
    return torch.stack(sums) if sums else rows[:0]
