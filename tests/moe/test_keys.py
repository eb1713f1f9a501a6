"""Choices of keys: how they are recorded and replayed."""

from __future__ import annotations

import pytest
import torch

from moe.keys import NO_KEYS, KeyReplay
from moe.routes import Replay


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
