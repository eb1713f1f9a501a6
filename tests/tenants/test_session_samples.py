"""Which kept sample a sequence is, whose routes it replays."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch

from mrl.errors import InputError
from mrl.service.sessions import samples as kept_samples
from mrl.service.sessions.samples import Samples
from mrl.types import RoutingTrace, Sample
from tests.parallel.conftest import make_samples


def other_routes(sample: Sample) -> RoutingTrace:
    """Return the routes of a sample in the other order of its rows."""
    assert sample.routing is not None
    return replace(sample.routing, expert_ids=sample.routing.expert_ids.flip(0))


def test_samples_are_found_by_tokens_and_log_probs() -> None:
    kept, (one, other) = Samples(), make_samples()[:2]
    twins = [
        replace(one, rollout_logprobs=torch.where(one.loss_mask, value, 0.0), routing=routing)
        for value, routing in ((-1.0, one.routing), (-2.0, other_routes(one)))
    ]
    for name, each in zip("abx", [*twins, twins[1]], strict=True):  # two have the same routes
        kept.keep(name, each)
    first, second = (each.routing for each in twins)
    tokens, given = one.token_ids, torch.full((len(one.token_ids),), -1.0)
    for asked, found in (
        ((None, tokens, None), (second, True)),  # the newest of several
        ((None, tokens, given), (first, False)),
        ((None, tokens, 2 * given), (second, False)),
        ((None, tokens, 3 * given), (second, True)),
        (("a", tokens, 2 * given), (first, False)),
        (("c", other.token_ids, given), (None, False)),
    ):
        match = kept.find(*asked)
        assert (match.routing is found[0], match.is_ambiguous) == (True, found[1]), asked


def test_routes_beyond_the_limit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_samples()[0]
    assert one.routing is not None
    monkeypatch.setattr(kept_samples, "MAX_ROUTE_BYTES", 2 * one.routing.num_bytes)
    kept = Samples()
    for name in "abc":
        kept.keep(name, replace(one, routing=copy(one.routing)))
    with pytest.raises(InputError, match="'a' are not kept"):
        kept.routes_of("a", one.token_ids)
    assert kept.find("a", one.token_ids, None).routing is kept.routes_of("c", one.token_ids)
    assert kept._alike == {key: ["b", "c"] for key in kept._alike}
