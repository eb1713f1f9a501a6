"""Routes are split without a copy."""

from __future__ import annotations

import torch

from moe.align import split_rows
from tests.moe.test_route_rows import make_routes


def test_split_rows() -> None:
    routes = make_routes(7, 2, 8, 2)
    first, second = split_rows(routes, [3, 4])
    assert torch.equal(first.packed, routes.packed[:3])
    assert torch.equal(second.packed, routes.packed[3:])
