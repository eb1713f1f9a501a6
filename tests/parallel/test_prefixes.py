"""Which rows samples have in common, and how samples with common rows are packed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe.align import routes_of_trace, with_native_rows
from mrl.sampling_mask import SamplingMask
from mrl.shared_prefixes import SharedPrefixes
from mrl.types import Sample, TokenRoutes
from parallel import prefixes
from parallel.context import context_slice
from parallel.dims import ParallelDims
from parallel.packing import num_rows, pack
from parallel.prefix_packing import FamilyPack, families_of, pack_families, plan_shares
from parallel.prefixes import common_rows, shared_prefixes
from tests.parallel.conftest import make_sample, weighted
from tests.parallel.shared_samples import make_groups, with_prefix, with_route, with_token


class One:
    """The group of a rank that is alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def routes_of(samples: list[Sample]) -> list[TokenRoutes | None]:
    return [routes_of_trace(s.routing) if s.routing else None for s in samples]


def common(samples: list[Sample], multiple_of: int = 1) -> list[list[int]]:
    return common_rows(samples, routes_of(samples), multiple_of).tolist()


def by_definition(samples: list[Sample]) -> list[list[int]]:
    """Compare every pair, row by row."""

    def pair(a: Sample, b: Sample) -> int:
        assert a.routing is not None
        assert b.routing is not None
        count = 0
        while (
            count + 1 < min(len(a.token_ids), len(b.token_ids))
            and torch.equal(a.token_ids[: count + 2], b.token_ids[: count + 2])
            and torch.equal(a.routing.expert_ids[count], b.routing.expert_ids[count])
        ):
            count += 1
        return count

    return [[pair(a, b) if a is not b else 0 for b in samples] for a in samples]


@pytest.fixture
def group() -> list[Sample]:
    """A prompt of 13 tokens with four answers."""
    return make_groups((13,))


def test_all_but_the_last_token_of_the_prompt_are_shared(group: list[Sample]) -> None:
    assert common(group) == [[0 if i == j else 12 for j in range(4)] for i in range(4)]
    assert common(group, 8)[0] == [0, 8, 8, 8]


@pytest.mark.parametrize(("change", "left"), [(with_route, 7), (with_token, 6)])
def test_one_other_route_or_token_splits_there(
    group: list[Sample], change: object, left: int
) -> None:
    """Row 7 is not shared where its own route differs; nor is row 6, which predicts another token."""
    assert callable(change)
    group[2] = change(group[2], 7)
    assert common(group)[2] == [left, left, 0, left]
    assert common(group)[0] == [0, 12, left, 12]


def test_branches_share_with_the_branch_that_is_most_alike() -> None:
    generator = torch.Generator().manual_seed(3)
    samples = [make_sample(generator, 30, 6)]
    for number in range(1, 16):
        other = samples[int(torch.randint(number, (1,), generator=generator))]
        prefix = int(torch.randint(1, 25, (1,), generator=generator))
        length = int(torch.randint(prefix + 1, 31, (1,), generator=generator))
        prefix = min(prefix, len(other.token_ids))
        samples.append(with_prefix(make_sample(generator, length, 6), other, prefix))
    expected = by_definition(samples)
    assert common(samples) == expected
    order = torch.randperm(16, generator=generator)
    matrix = torch.tensor(expected)
    rows = [sum(shared_prefixes(m).num_rows) for m in (matrix, matrix[order][:, order])]
    assert rows[0] == rows[1] > 0


def test_samples_without_routes_and_with_native_rows(group: list[Sample]) -> None:
    bare = [dataclasses.replace(s, routing=None) for s in group]
    assert common(bare)[0] == [0, 12, 12, 12]
    assert common([group[0], bare[1]]) == [[0, 0], [0, 0]]
    routes = routes_of(group)
    stale = torch.zeros(len(group[1].token_ids) - 1, dtype=torch.bool)
    stale[4] = True
    assert routes[1] is not None
    routes[1] = with_native_rows(routes[1], stale)
    assert common_rows(group, routes)[0].tolist() == [0, 4, 12, 12]
    assert routes[2] is not None
    other = with_native_rows(routes[2], torch.arange(len(routes[2].captured)) == 4)
    other.expert_ids[4] = 99  # undefined where nothing was captured
    assert common_rows(group[1:3], [routes[1], other])[0].tolist() == [0, 12]


@pytest.mark.parametrize("kind", ["equal", "branch at one row", "two lengths", "other routes"])
def test_many_samples_are_compared_with_few_others_each(
    kind: str, group: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervised batch may have a thousand samples of a prompt."""
    first, num = group[0], 40
    many = [dataclasses.replace(first) for _ in range(num)]
    if kind == "branch at one row":
        places = torch.arange(len(first.token_ids))
        ids = [torch.where(places == 9, 1000 + n, first.token_ids) for n in range(num)]
        many = [dataclasses.replace(first, token_ids=each) for each in ids]
    elif kind == "two lengths":
        short = with_prefix(make_sample(torch.Generator(), 14, 9), first, 14)
        many = [dataclasses.replace((first, short)[n % 2]) for n in range(num)]
    elif kind == "other routes":
        assert first.routing is not None
        routes = [first.routing.expert_ids.clone() for _ in range(num)]
        for n, each in enumerate(routes):
            shift = torch.tensor([n // 4**layer % 4 for layer in range(each.shape[1])])
            each[3] = (each[3] + shift[:, None]) % 4
        traces = [dataclasses.replace(first.routing, expert_ids=each) for each in routes]
        many = [dataclasses.replace(first, routing=trace) for trace in traces]
    counted: list[int] = []
    real = prefixes._compare
    monkeypatch.setattr(
        prefixes, "_compare", lambda *given: counted.append(given[2]) or real(*given)
    )
    found = common(many)
    assert found == by_definition(many)
    assert len(counted) <= 2 * num


def test_gate_weights_count_byte_by_byte(group: list[Sample]) -> None:
    def gated(sample: Sample, zero: float) -> Sample:
        assert sample.routing is not None
        weights = torch.full(sample.routing.expert_ids.shape, 0.5)
        weights[3, 0, 0] = zero
        trace = dataclasses.replace(sample.routing, expert_weights=weights)
        return dataclasses.replace(sample, routing=trace)

    assert common([gated(group[0], 0.0), gated(group[1], -0.0)])[0] == [0, 3]


def test_rows_that_predict_loss_tokens_with_a_sampling_mask_are_not_shared() -> None:
    generator = torch.Generator().manual_seed(0)
    first = make_sample(generator, 20, 8)
    pair = [first, with_prefix(make_sample(generator, 18, 8), first, 15)]
    assert common(pair)[0] == [0, 14]
    masked = [
        dataclasses.replace(
            s, sampling_mask=SamplingMask(torch.zeros(0).int(), torch.zeros(len(s.token_ids)).int())
        )
        for s in pair
    ]
    assert common(masked)[0] == [0, 7]


def test_packed_tokens_and_computed_rows(group: list[Sample]) -> None:
    """N packed tokens are as without sharing; each of them has the row of its own prefix."""
    matrix = common_rows(group, routes_of(group))
    shared = shared_prefixes(matrix)
    assert shared == SharedPrefixes((0, 0, 0, 0), (0, 12, 12, 12))
    plain = pack([weighted(s) for s in group])
    batch = pack([weighted(s) for s in group], 16, shared=shared)
    assert num_rows(batch) == 48
    assert batch.num_tokens == 48 + 36
    assert torch.equal(batch.input_ids[: plain.num_tokens], plain.input_ids)

    context = context_slice(batch.cu_seqlens, One(), torch.device("cpu"), batch.shared)  # type: ignore[arg-type]
    assert context.index is not None
    assert context.places is not None
    assert context.num_rows == len(context.index) == 48
    assert torch.equal(batch.input_ids[context.index][context.places], batch.input_ids)
    assert torch.equal(batch.position_ids[context.index][context.places], batch.position_ids)
    flags = torch.zeros(batch.num_tokens, dtype=torch.bool)
    flags[25] = True  # the eighth token of the second sequence: row 7 of the first
    assert context.take_any(flags).nonzero().flatten().tolist() == [7]
    packed, source = context.tokens_of_rows(slice(7, 9))
    assert packed.tolist() == [7, 8, 25, 26, 47, 48, 64, 65]
    assert source.tolist() == [0, 1] * 4


def test_many_rows_after_a_prefix_are_several_blocks_of_queries() -> None:
    """Otherwise all pairs of a long suffix would be computed, twice as many as are needed."""

    def blocks(length: int) -> list[tuple[int, int]]:
        bounds = torch.tensor([0, 600, 600 + length]).int()
        shared = SharedPrefixes((0, 0), (0, 100))
        context = context_slice(bounds, One(), torch.device("cpu"), shared)  # type: ignore[arg-type]
        assert (context.blocks[0].offset, context.blocks[0].num_tokens) == (0, 600)  # not shared
        return [(each.offset, each.num_tokens) for each in context.blocks[1:]]

    assert blocks(100 + 511) == [(100, 511)]
    assert blocks(100 + 512) == [(100, 256), (356, 256)]
    assert blocks(100 + 1030) == [(100, 257), (357, 258), (615, 257), (872, 258)]
    assert len(blocks(100 + 9000)) == 4


def numbers(packs: list[FamilyPack]) -> list[list[int]]:
    return [pack.members for pack in packs]


def test_families_are_packed_whole_and_within_the_budget() -> None:
    samples = make_groups((40, 30, 20), (6, 5, 4, 3))
    families = families_of(samples, range(12), 1)
    assert [family.num_rows for family in families] == [40 + 18 + 3, 30 + 18 + 3, 20 + 18 + 3]
    whole = numbers(pack_families(families, 110))
    assert whole == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    tight = pack_families(families, 50)
    assert all(pack.num_rows <= 50 for pack in tight)
    assert sorted(i for pack in tight for i in pack.members) == list(range(12))
    assert all(len({samples[i].group_id for i in pack.members}) == 1 for pack in tight)
    assert numbers(pack_families(families_of(samples, [0], 1), 3)) == [
        [0]
    ]  # longer than the budget


def test_a_micro_batch_has_a_limit_of_tokens_too() -> None:
    """64 short answers to a long prompt are few rows, but every token has keys and values."""
    samples = make_groups((2048,), (32,) * 64)
    packs = pack_families(families_of(samples, range(64), 1), 4608)
    assert sorted(i for pack in packs for i in pack.members) == list(range(64))
    assert [len(pack.members) for pack in packs] == [8] * 8  # 4 x 4608 tokens hold 8.8 of 2,080


def dims(world: int = 1, **sizes: int) -> ParallelDims:
    return ParallelDims(
        world=world, **{**dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp"), 1), **sizes}
    )


def test_when_sharing_pays() -> None:
    """Only where the slowest rank has MIN_GAIN times fewer rows; groups are cut to fill the ranks."""
    long, short = make_groups((40, 30, 20), (6, 5, 4, 3)), make_groups((3, 3), (30, 29, 31, 28))
    assert plan_shares(long, dims(), 128) == [list(range(12))]
    assert plan_shares(short, dims(), 128) is None
    assert plan_shares(make_groups((40,), (6,)), dims(), 128) is None
    two = plan_shares(long, dims(2), 128)
    assert two is not None
    assert sorted(i for own in two for i in own) == list(range(12))
    alone = plan_shares(make_groups((40,), (60, 60, 60, 60)), dims(2), 512)
    assert alone is not None
    assert sorted(map(len, alone)) == [2, 2]


def test_meta_samples_suffice_for_the_plan() -> None:
    samples = make_groups((40, 30, 20), (6, 5, 4, 3))
    outlines = [dataclasses.replace(s, token_ids=s.token_ids.to("meta")) for s in samples]
    assert plan_shares(outlines, dims(2), 128) == plan_shares(samples, dims(2), 128)
