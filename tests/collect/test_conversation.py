"""Sessions of several turns: what is trained, and whose routes a row has."""

import dataclasses

import pytest
import torch

from moe.trace import join_traces
from mrl.collect.conversation import Conversation
from mrl.engines.base import Completion
from mrl.sampling_mask import SamplingMask
from mrl.types import RoutingTrace, VersionSpan

P = 4


def trace(num_rows, *, version=0, cached=0, recomputed=0, marker=0):
    """Row r has experts (r + marker) % 8 and the next one in each of 2 layers."""
    first = (torch.arange(num_rows) + marker) % 8
    ids = torch.stack([first, (first + 1) % 8], -1)[:, None].expand(-1, 2, -1)
    return RoutingTrace(
        expert_ids=ids.to(torch.uint8).contiguous(),
        layer_numbers=(1, 2),
        num_experts=8,
        row_versions=(VersionSpan(version, 0, num_rows),),
        num_cached_rows=cached,
        num_recomputed_rows=recomputed,
    )


def turn(talk, ids, *, version=0, reason="stop", routing=None):
    start = len(talk.token_ids)
    spans = (VersionSpan(version, start, start + len(ids)),) if ids else ()
    logprobs = -torch.arange(1.0, len(ids) + 1)
    return Completion("r", torch.tensor(ids), logprobs, reason, spans, routing)


def test_three_turns_become_one_sample():
    talk = Conversation.start(5, torch.arange(P))
    talk = talk.with_completion(turn(talk, [10, 11], routing=trace(5)))
    talk = talk.with_tokens(torch.tensor([20, 21, 22]))
    talk = talk.with_completion(turn(talk, [12], version=1, routing=trace(9, marker=1)))
    talk = talk.with_tokens(torch.tensor([23]))
    talk = talk.with_completion(turn(talk, [13, 14], version=1, routing=trace(12)))
    assert (talk.num_turns, talk.finish_reason) == (3, None)
    with pytest.raises(ValueError, match="not finished"):
        talk.sample(0)
    sample = talk.finished("stop").sample(0)
    assert sample.token_ids.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 22, 12, 23, 13, 14]
    assert sample.loss_mask.int().tolist() == [0] * 4 + [1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert sample.rollout_logprobs.tolist() == [0] * 4 + [-1, -2, 0, 0, 0, -1, 0, -1, -2]
    assert (sample.group_id, sample.prompt_len, sample.finish_reason) == (5, 4, "stop")
    assert sample.turn_rewards == ()
    earned = talk.finished("stop").sample(0, [0.5, 0.0, 1.0]).turn_rewards
    assert earned == ((6, 0.5), (10, 0.0), (13, 1.0))
    with pytest.raises(ValueError, match="shorter"):
        talk.finished("stop").sample(0, [0.5])
    assert sample.weight_versions == (
        VersionSpan(0, 4, 6), VersionSpan(1, 9, 10), VersionSpan(1, 11, 13),
    )  # fmt: skip


def test_sampling_masks_follow_the_tokens_of_the_policy():
    def drawn(talk, *sets):
        completion = turn(talk, [tokens[0] for tokens in sets])
        return dataclasses.replace(completion, sampling_mask=SamplingMask.of(sets))

    talk = Conversation.start(5, torch.arange(P))
    talk = talk.with_completion(drawn(talk, [10, 1], [11]))
    talk = talk.with_tokens(torch.tensor([20, 21]))
    talk = talk.with_completion(drawn(talk, [12, 2, 3]))
    talk = talk.with_tokens(torch.tensor([22]))
    mask = talk.finished("stop").sample(0).sampling_mask
    assert mask.counts.tolist() == [0, 0, 0, 0, 2, 1, 0, 0, 3]
    assert mask.token_ids.tolist() == [10, 1, 11, 12, 2, 3]


def test_routes_are_those_of_the_turn_that_first_read_the_token():
    talk = Conversation.start(0, torch.arange(P))
    for marker, num_rows in ((0, 5), (3, 9), (6, 12)):
        new = [9] * (num_rows + 1 - len(talk.token_ids) - (2 if marker else 0))
        if marker:
            talk = talk.with_tokens(torch.tensor([1, 1]))
        routing = trace(num_rows, marker=marker, version=marker)
        talk = talk.with_completion(turn(talk, new, routing=routing, version=marker))
    routing = talk.finished("stop").sample(0).routing
    # Turn 2 was the first to read the last token of turn 1 (token 5) and the tokens between.
    expected = [r % 8 for r in range(5)] + [(r + 3) % 8 for r in range(5, 9)]
    expected += [(r + 6) % 8 for r in range(9, 12)]
    assert routing.expert_ids[:, 0, 0].tolist() == expected
    assert routing.row_versions == (
        VersionSpan(0, 0, 5), VersionSpan(3, 5, 9), VersionSpan(6, 9, 12),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [((2, 0), (6, 0), (2, 0)), ((0, 0), (7, 0), (7, 0)), ((0, 3), (0, 9), (0, 9))],
)
def test_what_was_cached_or_computed_again_within_the_kept_rows_does_not_count(old, new, expected):
    joined = join_traces(
        trace(5, cached=old[0], recomputed=old[1]), trace(9, cached=new[0], recomputed=new[1])
    )
    assert (joined.num_cached_rows, joined.num_recomputed_rows) == expected
    assert joined.row_versions == (VersionSpan(0, 0, 9),)


def test_an_abort_ends_the_session_with_what_there_was():
    start = Conversation.start(0, torch.arange(P))
    empty = start.with_completion(turn(start, [], reason="abort")).sample(7)
    assert (empty.token_ids.tolist(), empty.finish_reason) == ([0, 1, 2, 3], "abort")
    assert empty.weight_versions == (VersionSpan(7, 4, 4),)
    assert empty.routing is None
    talk = start.with_completion(turn(start, [10], routing=trace(4)))
    asked = talk.with_tokens(torch.tensor([20, 21]))
    partial = asked.with_completion(turn(asked, [11], reason="abort", routing=trace(7))).sample(0)
    assert partial.token_ids.tolist() == [0, 1, 2, 3, 10, 20, 21, 11]
    assert len(partial.routing.expert_ids) == 7
    # Nothing came: what had been asked is of no use, and has no routes.
    none = asked.with_completion(turn(asked, [], reason="abort")).sample(0)
    assert none.token_ids.tolist() == [0, 1, 2, 3, 10]
    assert len(none.routing.expert_ids) == 4


def test_what_does_not_fit_is_refused():
    talk = Conversation.start(0, torch.arange(P))
    with pytest.raises(ValueError, match=r"cover tokens None, expected \(4, 4\)"):
        talk.with_completion(turn(talk, []))
    longer = talk.with_tokens(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"cover tokens \(4, 5\), expected \(5, 6\)"):
        longer.with_completion(turn(talk, [1]))
    with pytest.raises(ValueError, match="got 3 rows, expected 4"):
        talk.with_completion(turn(talk, [1], routing=trace(3)))
    talk = talk.with_completion(turn(talk, [1]))
    with pytest.raises(ValueError, match="has routes, where the turns before had not"):
        talk.with_completion(turn(talk, [1], routing=trace(5)))
    with pytest.raises(ValueError, match="got 3 rows to continue 5"):
        join_traces(trace(5), trace(3))
