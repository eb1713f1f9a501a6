"""Rows of routes from other weights than their tokens: found, kept from the replay, out of the loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.align import local_routes
from moe.provenance import provenance_metrics, stale_rows, without_stale_tokens
from mrl.algorithms import gspo
from mrl.learn.batching import make_train_batches
from mrl.types import NATIVE_ROUTE, RoutingTrace, Sample, VersionSpan
from parallel.dims import ParallelDims

Spans = list[tuple[int, int, int]]


def make_sample(rows: Spans, tokens: Spans, mask: list[int], prompt_len: int = 3) -> Sample:
    """`mask`: the loss tokens."""
    length = rows[-1][2] + 1
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[mask] = True
    ids = torch.tensor([1, 2], dtype=torch.uint8).expand(length - 1, 3, 2)
    spans = tuple(VersionSpan(*span) for span in rows)
    return Sample(
        group_id=5,
        token_ids=torch.arange(length),
        prompt_len=prompt_len,
        loss_mask=loss_mask,
        rollout_logprobs=torch.zeros(length),
        weight_versions=tuple(VersionSpan(*span) for span in tokens),
        finish_reason="stop",
        routing=RoutingTrace(ids, (1, 2, 3), 4, spans, num_cached_rows=2, num_recomputed_rows=1),
    )


CASES: dict[str, tuple[Spans, Spans, list[int], list[int]]] = {
    # name: rows, tokens, loss mask; stale rows. Eight tokens, three of them the prompt.
    "one version": ([(4, 0, 7)], [(4, 3, 8)], [3, 4, 5, 6, 7], []),
    "all of it older": ([(3, 0, 7)], [(4, 3, 8)], [3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6]),
    "cached prompt of older weights": ([(3, 0, 2), (4, 2, 7)], [(4, 3, 8)], [3, 4, 5, 6, 7], [0, 1]),
    "updated in flight": ([(3, 0, 4), (4, 4, 7)], [(3, 3, 5), (4, 5, 8)], [3, 4, 5, 6, 7], []),
    "computed anew by newer weights": ([(4, 0, 7)], [(3, 3, 5), (4, 5, 8)], [3, 4, 5, 6, 7],
                                       [0, 1, 2, 3]),
    "row late by one": ([(3, 0, 5), (4, 5, 7)], [(3, 3, 5), (4, 5, 8)], [3, 4, 5, 6, 7], [4]),
    # Tokens 4 and 5 are a tool's; it answered after the update.
    "tool tokens, rows new": ([(3, 0, 3), (4, 3, 7)], [(3, 3, 4), (4, 6, 8)], [3, 6, 7], []),
    "tool tokens, rows old": ([(3, 0, 5), (4, 5, 7)], [(3, 3, 4), (4, 6, 8)], [3, 6, 7], [3, 4]),
    "after the last loss token": ([(3, 0, 4), (4, 4, 7)], [(3, 3, 8)], [3, 4], []),
    "nothing in the loss": ([(3, 0, 7)], [(4, 3, 8)], [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    rows, tokens, mask, expected = CASES[name]
    sample = make_sample(rows, tokens, mask)
    stale = stale_rows(sample)
    assert ([] if stale is None else stale.nonzero().flatten().tolist()) == expected
    ((kept,), _) = without_stale_tokens([sample])
    assert kept.loss_mask.nonzero().flatten().tolist() == [t for t in mask if t - 1 not in expected]
    assert sample.loss_mask.nonzero().flatten().tolist() == mask  # the rollout's own stays


@st.composite
def histories(draw) -> Sample:
    """Any versions of rows and tokens, any mask behind the prompt."""
    length, prompt_len = draw(st.integers(2, 12)), 1
    version = st.integers(0, 2)
    rows = draw(st.lists(version, min_size=length - 1, max_size=length - 1))
    tokens = draw(st.lists(version, min_size=length - 1, max_size=length - 1))
    mask = draw(st.lists(st.integers(1, length - 1), unique=True))
    return make_sample(
        [(v, i, i + 1) for i, v in enumerate(rows)],
        [(v, i + 1, i + 2) for i, v in enumerate(tokens)],
        mask,
        prompt_len,
    )


@given(sample=histories())
@settings(deadline=None)
def test_the_rule_row_by_row(sample: Sample) -> None:
    assert sample.routing is not None
    version = {t: s.version for s in sample.weight_versions for t in range(s.start, s.end)}
    row_version = {r: s.version for s in sample.routing.row_versions for r in range(s.start, s.end)}
    loss_tokens = sample.loss_mask.nonzero().flatten().tolist()
    stale = stale_rows(sample)
    for row, chosen_by in row_version.items():
        later = [t for t in loss_tokens if t > row]
        expected = bool(later) and version[later[0]] != chosen_by
        assert (stale is not None and bool(stale[row])) == expected


def test_a_loss_token_without_a_version_is_refused() -> None:
    sample = make_sample([(4, 0, 7)], [(4, 3, 5)], [3, 4, 5])
    with pytest.raises(ValueError, match=r"group 5: token 5 is in the loss, .*\[\(4, 3, 5\)\]"):
        stale_rows(sample)


def test_samples_without_routes_are_left_alone() -> None:
    sample = dataclasses.replace(make_sample([(3, 0, 7)], [], [3]), routing=None)
    ((kept,), stale) = without_stale_tokens([sample])
    assert kept is sample
    assert stale == [None]
    assert set(provenance_metrics([sample], stale).values()) == {0.0}


def test_metrics() -> None:
    older = make_sample(*CASES["cached prompt of older weights"][:3])
    samples = [older, make_sample(*CASES["one version"][:3])]
    assert provenance_metrics(samples, without_stale_tokens(samples)[1]) == {
        "routing/stale_rows": 2.0,
        "routing/cached_rows": 4.0,
        "routing/recomputed_rows": 2.0,
    }


class OneRank:
    """Holds as much of parallel.mesh.Mesh as batching reads."""

    dims = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
    dp_rank = 0


@pytest.mark.parametrize("replay", [True, False])
def test_stale_rows_are_native_in_the_batch_and_their_tokens_out_of_the_loss(replay: bool) -> None:
    late = make_sample(*CASES["row late by one"][:3])  # row 4 is stale, and with it token 5
    good = make_sample(*CASES["one version"][:3])
    samples, rows = [good, late, late], [None, None, None]
    if replay:
        samples, rows = without_stale_tokens(samples)
    parts = [(samples[:2], [1.0, 1.0]), (samples[2:], [1.0])]  # numbers restart in each mini-batch
    how = {} if replay else {"routes": None}
    first, second = make_train_batches(parts, gspo, OneRank(), 64, stale=rows, **how)  # type: ignore[arg-type]
    assert first.num_loss_tokens == (9 if replay else 10)
    for batch, lengths, stale in ((first, [8, 8], {12}), (second, [8], {4})):
        (micro,) = batch.micro_batches
        lost = {t for i in range(len(lengths)) for t in range(8 * i + 3, 8 * i + 8)} - set(
            micro.loss_mask.nonzero().flatten().tolist()
        )
        assert lost == ({row + 1 for row in stale} if replay else set())
        if not replay:
            assert micro.routes is None
            continue
        assert micro.routes is not None
        ids = local_routes(micro.routes, [1, 2, 3], 0, 1)[2]
        native = set((ids == NATIVE_ROUTE).all(-1).nonzero().flatten().tolist())
        assert native == stale | {8 * i + 7 for i in range(len(lengths))}
