"""Choices of keys: what an engine sends, how they are packed, and their replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe.keys import NO_KEYS, KeyReplay, decode_keys, join_keys, local_keys
from moe.routes import Replay

TOPK, LAYERS = 3, 2


def sent(num_tokens: int) -> np.ndarray:
    """Keys as SGLang sends them: the newest keys in layer 1, the oldest in layer 2, -1 at the end."""
    rows = np.full((num_tokens - 1, LAYERS, TOPK), -1, dtype=np.int32)
    for row in range(num_tokens - 1):
        count = min(row + 1, TOPK)
        rows[row, 0, :count] = np.arange(row, row - count, -1)
        rows[row, 1, :count] = np.arange(count)
    return rows


def decoded(rows: np.ndarray) -> Tensor:
    return decode_keys(rows.ravel(), num_tokens=len(rows) + 1, num_layers=LAYERS, topk=TOPK)


def test_an_engines_keys_are_read_as_they_are() -> None:
    rows = sent(7)
    assert torch.equal(decoded(rows), torch.from_numpy(rows))


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ((4, 1, 0), 5, r"position 4 has keys that come after the query in layer 2: \[5, 1, 2\]"),
        ((4, 0, 0), -2, "position 4 has keys that come after the query in layer 1"),
        ((4, 1, 0), 1, "position 4 has a key twice in layer 2"),
        ((4, 0, 2), -1, "position 4 has another number of keys than it has or can see in layer 1"),
        ((1, 0, 2), 0, "position 1 has a key twice in layer 1"),
    ],
)
def test_keys_that_no_indexer_chooses_are_refused(
    place: tuple[int, int, int], value: int, text: str
) -> None:
    rows = sent(7)
    rows[place] = value
    with pytest.raises(ValueError, match=text):
        decoded(rows)


def test_a_wrong_number_of_keys_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 35 numbers, expected 36: 7 tokens less the last"):
        decode_keys(sent(7).ravel()[:-1], num_tokens=7, num_layers=LAYERS, topk=TOPK)


def test_packing_leaves_the_last_token_padding_and_other_samples_to_the_indexer() -> None:
    one, other = decoded(sent(5)), decoded(sent(4))
    assert join_keys([None, None], [5, 4]) is None
    joined = join_keys([one, None, other, None], [5, 3, 4, 2], [6, 3, 4, 2])
    assert joined is not None
    assert joined.shape == (15, LAYERS, TOPK)
    assert torch.equal(joined[:4], one)
    assert torch.equal(joined[9:12], other)
    rest = torch.cat([joined[4:9], joined[12:]])
    assert (rest == NO_KEYS).all()
    with pytest.raises(ValueError, match="got 4 rows for 4 tokens, expected 3"):
        join_keys([one], [4])
    own = local_keys(joined, [2], slice(6, 12))
    assert own.keys() == {2}
    assert torch.equal(own[2], joined[6:12, 1])


def test_a_recompute_gets_the_choice_of_its_own_forward_pass() -> None:
    replay, (first, second) = KeyReplay(True), torch.arange(12).view(2, 2, 3).int()
    for target in (first, second, None):
        replay.begin_forward(target, with_grad=True)
        assert replay.next_target() is target
        replay.end_forward()
    assert replay.num_pending == 3
    assert [replay.next_target() for _ in range(3)] == [first, second, None]
    assert replay.num_pending == 0
    replay.begin_forward(first, with_grad=False)
    assert replay.num_pending == 0  # nothing follows


@pytest.mark.parametrize(("longest", "dtype"), [(32767, torch.int16), (32768, torch.int32)])
def test_choices_are_recorded_only_when_asked_and_narrowed(
    longest: int, dtype: torch.dtype
) -> None:
    replay, chosen = KeyReplay(True), torch.tensor([[0, 2, 5], [NO_KEYS] * 3], dtype=torch.int32)
    replay.begin_forward(None, with_grad=False)
    replay.record(chosen, longest)
    assert replay.recorded is None
    replay.begin_forward(None, with_grad=False, records=True)
    replay.record(chosen, longest)
    assert replay.recorded is not None
    assert replay.recorded.dtype == dtype
    assert torch.equal(replay.recorded.int(), chosen)
    replay.end_forward()
    replay.record(chosen + 1, longest)  # a recompute
    assert torch.equal(replay.recorded.int(), chosen)


def test_a_replay_keeps_its_keys_in_its_parts() -> None:
    keys = [{1: torch.tensor([n])} for n in range(4)]
    replay = Replay.rollout.with_keys(keys)
    part = replay.of_batches(slice(1, 3)).compared_with([])
    assert replay.kind == part.kind == "rollout"
    assert part.keys == (keys[1], keys[2])
    assert Replay.rollout.keys == ()
