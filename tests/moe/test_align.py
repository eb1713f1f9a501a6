"""Routes are split without a copy; layers and rows are taken as a chunk and a rank need them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe.align import local_routes, routes_of_trace, split_rows, take_bytes, with_native_rows
from mrl.types import NATIVE_ROUTE, RoutingTrace, VersionSpan
from tests.moe.test_route_rows import make_routes


def make_trace(ids: Tensor, num_experts: int, layers: Sequence[int]) -> RoutingTrace:
    narrow = ids.to(torch.uint8 if num_experts <= 256 else torch.uint16)
    spans = (VersionSpan(0, 0, len(ids)),)
    return RoutingTrace(narrow, tuple(layers), num_experts, spans, 0)


def test_split_rows() -> None:
    routes = make_routes(7, 2, 8, 2)
    first, second = split_rows(routes, [3, 4])
    assert torch.equal(first.expert_ids, routes.expert_ids[:3])
    assert torch.equal(second.expert_ids, routes.expert_ids[3:])
    assert first.expert_ids.data_ptr() == routes.expert_ids.data_ptr()


@pytest.mark.parametrize("layers", [(2, 3), (7, 2), (3,), (2, 3, 5, 7), ()])
@pytest.mark.parametrize(("num_experts", "topk"), [(8, 2), (256, 8), (257, 8), (256, 1), (512, 10)])
def test_local_routes(num_experts: int, topk: int, layers: tuple[int, ...]) -> None:
    """The largest id survives, also where 256 experts fill a byte: no id stands for "no route"."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(6, 4, num_experts, generator=generator).topk(topk).indices
    ids[0, 0] = torch.arange(num_experts - topk, num_experts)
    native = torch.arange(6) == 4
    routes = with_native_rows(routes_of_trace(make_trace(ids, num_experts, (2, 3, 5, 7))), native)
    wanted = ids.masked_fill(native[:, None, None], NATIVE_ROUTE)
    for tp_rank in range(2):
        found = local_routes(routes, layers, tp_rank, 2)
        assert tuple(found) == layers
        for number, own in found.items():
            assert own.dtype == torch.int64
            place = (2, 3, 5, 7).index(number)
            assert torch.equal(own, wanted[3 * tp_rank : 3 * tp_rank + 3, place])


@pytest.mark.parametrize("num_experts", [8, 300])
@pytest.mark.parametrize("topk", [2, 8])
def test_every_pair_of_a_row_is_compared(num_experts: int, topk: int) -> None:
    for first in range(topk):
        for second in range(first + 1, topk):
            ids = torch.arange(topk).repeat(5, 3, 1)
            ids[3, 1, second] = ids[3, 1, first]
            ids[4, 0, second] = ids[4, 0, first]  # the first one is named
            with pytest.raises(ValueError, match="token 3 repeats an expert in MoE layer 4"):
                routes_of_trace(make_trace(ids, num_experts, (2, 4, 6)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
def test_take_bytes(dtype: torch.dtype) -> None:
    values = torch.arange(24).to(dtype).reshape(4, 3, 2)
    assert take_bytes(values, torch.tensor([2, 0])).tolist() == values[[2, 0]].tolist()
