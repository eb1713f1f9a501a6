"""Copy token rows to their experts (`moe_permute`), and sum the experts' outputs (`moe_unpermute`).

Dimensions: n tokens, E experts, K slots for the experts of a token, m copies (one per slot that is
not empty), H hidden size. Copies are sorted by expert, then by token. The kernels are in
csrc/moe_permute.h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.kernels import backend
from mrl.kernels.moe_sort import ExpertOrder

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # order of csrc's RowType
_ALIGNMENT = 16  # bytes; the GPU kernels load vectors of this size


def moe_permute(
    rows: Tensor, order: ExpertOrder, table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copy each token's row once for each of its chosen experts. Both results are differentiable.

    Args:
        rows: [n, H] in f32, bf16, f16 or f64.
        order: the sorted choices, from `moe_sort`.
        table: [n, E], a value per token and expert, such as the gates; any dtype that `rows` may have.

    Returns:
        The copies [m, H], and the table's value for each copy, [m] (empty without a table). The
        gradient of a row is the sum of its copies' gradients in the order of `order.copies`, in fp32
        (fp64 for f64), rounded once.

    Raises:
        ValueError: for a wrong shape, dtype or device.
    """
    return torch.ops.mrl.moe_permute(rows, table, order.tokens, order.cells, order.copies)


def moe_unpermute(rows: Tensor, order: ExpertOrder, gates: Tensor | None = None) -> Tensor:
    """Sum the rows [m, H] of each token's copies into [n, H]; 0 for a token without copies.

    The sum runs in the order of `order.copies`, in fp32 (fp64 for f64 rows), and is rounded once.
    If `gates` f32[m] (f64 for f64 rows) are given, each row is first multiplied by its gate. The
    result is differentiable with respect to rows and gates.

    Raises ValueError for a wrong shape, dtype or device.
    """
    return torch.ops.mrl.moe_unpermute(rows, gates, order.tokens, order.copies)


def _rows(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy that is contiguous and, on a GPU, aligned for vector loads."""
    tensor = tensor.contiguous()
    if tensor.device.type == "cuda" and tensor.data_ptr() % _ALIGNMENT:
        return tensor.clone()
    return tensor


def _check_rows(name: str, rows: Tensor, legend: str) -> None:
    if rows.dim() != 2:
        raise ValueError(f"{name}: got shape {list(rows.shape)}, expected {legend}")
    if rows.dtype not in _TYPES:
        wanted = " or ".join(str(dtype) for dtype in _TYPES)
        raise ValueError(f"{name}: got dtype {rows.dtype}, expected {wanted}")


def _check_index(name: str, index: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    backend.check_tensor(name, index, shape, (torch.int32,), device, "as returned by moe_sort")


torch.library.define(
    "mrl::moe_permute",
    "(Tensor rows, Tensor? table, Tensor tokens, Tensor cells, Tensor copies) -> (Tensor, Tensor)",
)


@torch.library.register_fake("mrl::moe_permute")
def _permute_fake(
    rows: Tensor, table: Tensor | None, tokens: Tensor, cells: Tensor, copies: Tensor
) -> tuple[Tensor, Tensor]:
    _check_rows("rows", rows, "[n, H]")
    num_copies = tokens.shape[0]
    _check_index("tokens", tokens, (num_copies,), rows.device)
    _check_index("cells", cells, (num_copies,), rows.device)
    _check_index("copies", copies, (rows.shape[0], copies.shape[-1]), rows.device)
    out = rows.new_empty((num_copies, rows.shape[1]))
    if table is None:
        return out, rows.new_empty((0,))
    _check_rows("table", table, "[n, E]")
    if table.shape[0] != rows.shape[0] or table.device != rows.device:
        raise ValueError(
            f"table: got {table.shape[0]} tokens on {table.device}, expected {rows.shape[0]} on "
            f"{rows.device}, like the rows"
        )
    return out, table.new_empty((num_copies,))


@torch.library.impl("mrl::moe_permute", ("cpu", "cuda"))
def _permute(
    rows: Tensor, table: Tensor | None, tokens: Tensor, cells: Tensor, copies: Tensor
) -> tuple[Tensor, Tensor]:
    out, entries = _permute_fake(rows, table, tokens, cells, copies)
    _gather(rows, tokens, out, table, cells, entries)
    return out, entries


def _gather(
    rows: Tensor,
    index: Tensor,
    out: Tensor,
    table: Tensor | None = None,
    cells: Tensor | None = None,
    entries: Tensor | None = None,
) -> None:
    """Set `out[i] = rows[index[i]]` and, with a table, `entries[i] = table.view(-1)[cells[i]]`."""
    backend.run(
        "moe_permute",
        rows.device,
        rows=_rows(rows),
        index=index.contiguous(),
        num_copies=len(index),
        row_bytes=rows.shape[1] * rows.element_size(),
        table=None if table is None else table.contiguous(),
        cells=None if cells is None else cells.contiguous(),
        entry_bytes=0 if table is None else table.element_size(),
        out=out,
        entries=entries,
    )


torch.library.define(
    "mrl::moe_permute_grad",
    "(Tensor grad, Tensor? entries, Tensor cells, Tensor copies, int num_experts) "
    "-> (Tensor, Tensor)",
)


@torch.library.register_fake("mrl::moe_permute_grad")
def _permute_grad_fake(
    grad: Tensor, entries: Tensor | None, cells: Tensor, copies: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    rows = grad.new_empty((copies.shape[0], grad.shape[1]))
    if entries is None:
        return rows, grad.new_empty((0,))
    return rows, entries.new_empty((copies.shape[0], num_experts))


@torch.library.impl("mrl::moe_permute_grad", ("cpu", "cuda"))
def _permute_grad(
    grad: Tensor, entries: Tensor | None, cells: Tensor, copies: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [n, H] and table [n, E], given the gradients of both outputs.

    The gradient of a token's row is the sum of `grad` [m, H] over the token's copies. The gradient of
    the table has the value `entries[i]` at the flat index `cells[i]` and is 0 elsewhere; it is empty
    if `entries` is None.
    """
    rows, table = _permute_grad_fake(grad, entries, cells, copies, num_experts)
    _sum(grad, copies, rows, None, entries, cells, num_experts, table)
    return rows, table


def _sum(
    rows: Tensor,
    copies: Tensor,
    out: Tensor,
    gates: Tensor | None = None,
    entries: Tensor | None = None,
    cells: Tensor | None = None,
    num_experts: int = 0,
    table: Tensor | None = None,
) -> None:
    backend.run(
        "moe_unpermute",
        rows.device,
        type=_TYPES.index(rows.dtype),
        rows=_rows(rows),
        copies=copies.contiguous(),
        num_tokens=copies.shape[0],
        topk=copies.shape[1],
        num_columns=rows.shape[1],
        gates=None if gates is None else gates.contiguous(),
        entries=None if entries is None else entries.contiguous(),
        cells=None if cells is None else cells.contiguous(),
        num_experts=num_experts,
        entry_bytes=0 if entries is None else entries.element_size(),
        out=out,
        table=table,
    )


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, table, _, cells, copies = inputs
    ctx.num_experts = None if table is None else table.shape[1]
    ctx.save_for_backward(cells, copies)
    ctx.set_materialize_grads(False)
    if table is None:
        ctx.mark_non_differentiable(output[1])


def _permute_backward(
    ctx: Any, grad: Tensor | None, entries: Tensor | None
) -> tuple[Tensor | None, ...]:
    _refuse_second_gradient("moe_permute")
    cells, copies = ctx.saved_tensors
    if ctx.num_experts is None:
        entries = None
    if grad is None and entries is None:
        return None, None, None, None, None
    columns = entries.new_empty((len(cells), 0)) if grad is None and entries is not None else grad
    rows, table = torch.ops.mrl.moe_permute_grad(
        columns, entries, cells, copies, ctx.num_experts or 0
    )
    to_rows = rows if grad is not None else None
    return to_rows, table if entries is not None else None, None, None, None


def _refuse_second_gradient(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: got a backward with create_graph, but has no second derivative"
        )


torch.library.register_autograd("mrl::moe_permute", _permute_backward, setup_context=_save_permute)
torch.library.define(
    "mrl::moe_unpermute", "(Tensor rows, Tensor? gates, Tensor tokens, Tensor copies) -> Tensor"
)


@torch.library.register_fake("mrl::moe_unpermute")
def _unpermute_fake(rows: Tensor, gates: Tensor | None, tokens: Tensor, copies: Tensor) -> Tensor:
    _check_rows("rows", rows, "[m, H]")
    _check_index("tokens", tokens, (rows.shape[0],), rows.device)
    _check_index("copies", copies, (copies.shape[0], copies.shape[-1]), rows.device)
    if gates is not None:
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        legend = f"m = {rows.shape[0]} copies"
        backend.check_tensor("gates", gates, (rows.shape[0],), (dtype,), rows.device, legend)
    return rows.new_empty((copies.shape[0], rows.shape[1]))


@torch.library.impl("mrl::moe_unpermute", ("cpu", "cuda"))
def _unpermute(rows: Tensor, gates: Tensor | None, tokens: Tensor, copies: Tensor) -> Tensor:
    out = _unpermute_fake(rows, gates, tokens, copies)
    _sum(rows, copies, out, gates)
    return out


torch.library.define(
    "mrl::moe_unpermute_grad",
    "(Tensor grad, Tensor? rows, Tensor? gates, Tensor tokens) -> (Tensor, Tensor)",
)


@torch.library.register_fake("mrl::moe_unpermute_grad")
def _unpermute_grad_fake(
    grad: Tensor, rows: Tensor | None, gates: Tensor | None, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    to_rows = grad.new_empty((tokens.shape[0], grad.shape[1]))
    return to_rows, grad.new_empty((0,)) if gates is None else torch.empty_like(gates)


@torch.library.impl("mrl::moe_unpermute_grad", ("cpu", "cuda"))
def _unpermute_grad(
    grad: Tensor, rows: Tensor | None, gates: Tensor | None, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [m, H] and gates [m], given the gradient of the output, [n, H].

    The gradient of the gates is empty if `gates` is None.
    """
    to_rows, to_gates = _unpermute_grad_fake(grad, rows, gates, tokens)
    if rows is None or gates is None:
        _gather(grad, tokens, to_rows)
        return to_rows, to_gates
    backend.run(
        "moe_unpermute_grad",
        grad.device,
        type=_TYPES.index(grad.dtype),
        grad=_rows(grad),
        rows=_rows(rows),
        gates=gates.contiguous(),
        tokens=tokens.contiguous(),
        num_copies=len(tokens),
        num_columns=grad.shape[1],
        grad_rows=to_rows,
        grad_gates=to_gates,
    )
    return to_rows, to_gates


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, gates, tokens, _ = inputs
    ctx.save_for_backward(None if gates is None else rows, gates, tokens)


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_second_gradient("moe_unpermute")
    rows, gates, tokens = ctx.saved_tensors
    to_rows, to_gates = torch.ops.mrl.moe_unpermute_grad(grad, rows, gates, tokens)
    return to_rows, None if gates is None else to_gates, None, None


torch.library.register_autograd(
    "mrl::moe_unpermute", _unpermute_backward, setup_context=_save_unpermute
)
