"""What a pass counts of its routes: as a loop over layers and rows would, in one go for all layers."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.align import RouterRows
from moe.replay import LayerReplay, ReplayedChunk, margins
from moe.routes import GatedRoute, Route, ids_of
from moe.statistics import RoutingCounter
from mrl.system.histogram import log_histogram
from mrl.types import NATIVE_ROUTE, Max, Mean, Quantiles, Statistics
from tests.ranks import run_ranks

NUM_ROWS, NUM_EXPERTS, TOPK = 37, 8, 3
WAITS = {"_local_scalar_dense", "nonzero", "index", "masked_select", "lift_fresh"}
"""Operations that wait for a GPU: those that read a value or a size from it, or copy to it."""


class Ops(TorchDispatchMode):
    """The names of the torch operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def made_micro_batches(
    num_layers: int, watched: bool
) -> Iterator[tuple[ReplayedChunk, dict[int, Route], RouterRows]]:
    """Two micro-batches of a chunk after its forward; the last layer has no captured route."""
    torch.manual_seed(3)
    numbers = range(2, 2 + num_layers)
    for _ in range(2):
        layers, routes = {}, {}
        for number in numbers:
            scores = torch.rand(NUM_ROWS, NUM_EXPERTS)
            native = scores.topk(TOPK).indices
            captured = torch.rand(NUM_ROWS, NUM_EXPERTS).topk(TOPK).indices
            same, lost = torch.rand(2, NUM_ROWS)
            captured[same < 0.6] = native[same < 0.6]
            captured[lost < 0.2] = NATIVE_ROUTE
            used = torch.where(captured == NATIVE_ROUTE, native, captured)
            used[0] = native[0]  # a row whose route was not replayed
            layer = LayerReplay(number, keep_for_recompute=False)
            layer.native_ids = native
            layer.margins = margins(scores, native) if watched else None
            layer.routing_map = torch.zeros(NUM_ROWS, NUM_EXPERTS).scatter(1, used, 1).bool()
            layers[number] = layer
            if number != numbers[-1]:
                weights = torch.rand(NUM_ROWS, TOPK)
                routes[number] = GatedRoute(captured, weights) if number % 2 else captured
        chunk = types.SimpleNamespace(layers=layers)
        leading = torch.rand(NUM_ROWS) < 0.7
        rows = RouterRows(leading | (torch.rand(NUM_ROWS) < 0.2), leading, torch.zeros(0), 1)
        yield chunk, routes, rows  # pyright: ignore[reportReturnType]


def by_loop(num_layers: int, watched: bool) -> dict[str, Any]:
    """The statistics of `made_micro_batches`, one row and one choice at a time."""
    counts: dict[str, list[float]] = {}
    kept: dict[bool, list[float]] = {True: [], False: []}

    def count(key: str, part: float, whole: float) -> None:
        known = counts.setdefault(key, [0.0, 0.0])
        known[0] += part
        known[1] += whole

    for chunk, routes, rows in made_micro_batches(num_layers, watched):
        for row in range(NUM_ROWS):
            any_differs = False
            for number, route in routes.items():
                layer = chunk.layers[number]
                assert layer.native_ids is not None
                assert layer.routing_map is not None
                name = f"layer_{number:02d}"
                for key in ("routing/disagreement", f"routing/disagreement/{name}"):
                    count(key, 0, 0)
                if not rows.leading[row]:
                    continue
                ids = (route.ids if isinstance(route, GatedRoute) else route)[row].tolist()
                count("routing/replay_coverage", 0, 1)
                count("routing/captured_coverage", 0, ids[0] != NATIVE_ROUTE)
                if ids[0] == NATIVE_ROUTE:
                    continue
                native = layer.native_ids[row].tolist()
                wrong = sum(choice not in native for choice in ids)
                any_differs |= wrong > 0
                count("routing/disagreement", wrong, TOPK)
                count(f"routing/disagreement/{name}", wrong, TOPK)
                used = layer.routing_map[row].nonzero().flatten().tolist()
                for key in ("routing/replay_coverage", "routing/captured_coverage"):
                    count(key, set(used) == set(ids), 0)
                if layer.margins is not None:
                    margin = float(layer.margins[row])
                    kept[wrong > 0].append(margin)
                    kind = "disagreement" if wrong else "agreement"
                    count(f"routing/margin_at_{kind}", margin, 1)
                    if wrong:
                        count(f"routing/margin_at_disagreement/{name}", margin, 1)
            if rows.leading[row]:
                count("routing/token_any_layer", any_differs, 1)
    found: dict[str, Any] = {key: tuple(value) for key, value in counts.items()}
    for differs, kind in ((True, "disagreement"), (False, "agreement")) if watched else ():
        values = torch.tensor(kept[differs])
        whole = log_histogram(values, torch.ones_like(values, dtype=torch.bool))
        found[f"routing/margin_median_at_{kind}"] = whole.tolist()
    return found


def counted(num_layers: int, watched: bool, made: Any = made_micro_batches) -> dict[str, Any]:
    """What a rank of its own counts; of loads the maxima and entropies."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    counter = RoutingCounter()
    for number, (chunk, routes, rows) in enumerate(made(num_layers, watched)):
        counter.add(number, chunk, routes, rows)
    assert dist.group.WORLD is not None
    stats: Statistics = counter.statistics(dist.group.WORLD)
    numbers = list(range(2, 2 + num_layers))
    loads = counter.load_statistics(numbers, NUM_EXPERTS, torch.device("cpu"))
    return {key: plain(value) for key, value in (stats | loads).items()}


def plain(value: Any) -> Any:
    if isinstance(value, Mean):
        return float(value.total), float(value.count)
    if isinstance(value, Quantiles):
        return value.counts.tolist()
    assert isinstance(value, Max)
    return float(value.value)


@pytest.mark.parametrize("watched", [True, False])
def test_counts_are_those_of_a_loop_over_layers_rows_and_choices(
    tmp_path: Path, watched: bool
) -> None:
    num_layers = 4
    (found,) = run_ranks(1, counted, num_layers, watched, folder=tmp_path)
    wanted = by_loop(num_layers, watched)
    loads = {key: found.pop(key) for key in list(found) if key.startswith("moe/")}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        approximate = "margin_at" in key  # sums of fractions, in another order
        assert found[key] == (pytest.approx(value, rel=1e-12) if approximate else value), key
    batches = list(made_micro_batches(num_layers, watched))
    for number in range(2, 2 + num_layers):
        load: Tensor = torch.zeros(NUM_EXPERTS)
        for chunk, _, rows in batches:
            routing_map = chunk.layers[number].routing_map
            assert routing_map is not None
            load += routing_map[rows.counted].sum(0)
        fullest = float(load.max() / load.sum() * NUM_EXPERTS)
        assert loads[f"moe/load_max/layer_{number:02d}"] == pytest.approx(fullest)


def shared_rows(
    num_layers: int, watched: bool
) -> Iterator[tuple[ReplayedChunk, dict[int, Route], RouterRows]]:
    """`made_micro_batches` in which most rows belong to several tokens, some to none that counts."""
    for chunk, routes, _ in made_micro_batches(num_layers, watched):
        source = torch.randint(NUM_ROWS, (3 * NUM_ROWS,))
        leading = torch.rand(len(source)) < 0.7
        also = leading | (torch.rand(len(source)) < 0.2)
        yield chunk, routes, RouterRows(also, leading, torch.zeros(0), 1, source, NUM_ROWS)


def spread_rows(
    num_layers: int, watched: bool
) -> Iterator[tuple[ReplayedChunk, dict[int, Route], RouterRows]]:
    """`shared_rows` with a row of its own for each token."""
    for chunk, routes, rows in shared_rows(num_layers, watched):
        source = rows.source
        assert source is not None
        for layer in chunk.layers.values():
            for name in ("native_ids", "margins", "routing_map"):
                value = getattr(layer, name)
                setattr(layer, name, None if value is None else value[source])
        spread: dict[int, Route] = {n: ids_of(route)[source] for n, route in routes.items()}
        yield chunk, spread, RouterRows(rows.counted, rows.leading, rows.segments, 1)


def shared_and_spread(num_layers: int, watched: bool) -> list[dict[str, Any]]:
    return [counted(num_layers, watched, made) for made in (shared_rows, spread_rows)]


@pytest.mark.parametrize("watched", [True, False])
def test_a_shared_row_counts_as_often_as_it_has_tokens(tmp_path: Path, watched: bool) -> None:
    ((found, wanted),) = run_ranks(1, shared_and_spread, 4, watched, folder=tmp_path)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        approximate = "margin_at" in key
        assert found[key] == (pytest.approx(value, rel=1e-12) if approximate else value), key
    assert wanted["routing/token_any_layer"][1] > NUM_ROWS  # more tokens than rows


def ops_of_adding(num_layers: int, made: Any = made_micro_batches) -> list[str]:
    counter = RoutingCounter()
    batches = list(made(num_layers, watched=True))
    with Ops() as ops:
        for number, (chunk, routes, rows) in enumerate(batches):
            counter.add(number, chunk, routes, rows)
    return ops.names


def test_counting_is_as_many_kernels_for_many_layers_and_waits_for_none() -> None:
    """A loop over the layers made 72 operations a layer and micro-batch: 3,366 for these 48."""
    for made in (made_micro_batches, shared_rows):
        few, many = ops_of_adding(3, made), ops_of_adding(48, made)
        assert len(few) == len(many)
        assert len(many) / 2 < 80
        assert not WAITS & set(many)
