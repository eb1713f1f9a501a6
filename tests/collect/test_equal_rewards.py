"""The warning about steps whose rewards have no learning signal, and how often it is repeated."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from mrl.algorithms import load_algorithm
from mrl.collect.equal_rewards import EqualRewards
from mrl.config import AlgorithmConfig
from mrl.types import SampleGroup

NAN = float("nan")


def groups_of(*rewards: list[float]) -> list[SampleGroup]:
    empty = SampleGroup(prompt=cast(Any, None), samples=[])
    return [replace(empty, rewards=torch.tensor(each)) for each in rewards]


def warnings_of(name: str, steps: list[list[SampleGroup]], **keys: Any) -> list[str]:
    config, said = AlgorithmConfig(name=name, **keys), []
    counter = EqualRewards(load_algorithm(name), config, 10, said.append)
    for step, groups in enumerate(steps):
        counter.look(step, groups)
    return said


def test_equal_rewards_of_each_prompt_are_said_at_the_second_step_and_the_twentieth() -> None:
    zero = groups_of([0.0, 0.0], [0.0, NAN])
    first, second = warnings_of("gspo", [zero] * 25)
    assert first.startswith("steps 0 to 1: all samples had the reward 0, so nothing was learned")
    assert second.startswith("steps 0 to 19: ")
    (line,) = warnings_of("gspo", [groups_of([0.0, 0.0], [1.0, 1.0])] * 2)
    assert "the samples of each prompt had equal rewards" in line
    (line,) = warnings_of("gspo", [groups_of([NAN, NAN])] * 2)
    assert "no sample had a reward" in line


def test_a_step_with_a_signal_resets_the_count() -> None:
    zero, good = groups_of([0.0, 0.0]), groups_of([0.0, 0.0], [0.0, 1.0])
    assert not warnings_of("gspo", [zero, good, zero, good])
    first, second = warnings_of("gspo", [zero, zero, good, zero, zero])
    assert first.startswith("steps 0 to 1")
    assert second.startswith("steps 3 to 4")


def test_a_critic_learns_from_equal_rewards() -> None:
    assert not warnings_of("ppo", [groups_of([0.0, 0.0])] * 3)


def test_algorithms_that_compare_prompts_learn_from_them() -> None:
    assert not warnings_of("reinforce_pp", [groups_of([0.0, 0.0], [1.0, 1.0])] * 3)


def test_algorithms_that_whiten_learn_nothing_from_equal_rewards_of_a_whole_step() -> None:
    for name in ("reinforce_pp", "decoupled_ppo"):
        (line,) = warnings_of(name, [groups_of([1.0, 1.0], [1.0, NAN])] * 2)
        assert "all samples had the reward 1, so nothing was learned" in line


def test_a_penalty_for_long_answers_is_a_signal() -> None:
    groups = [
        replace(group, samples=[cast(Any, SimpleNamespace(num_generated=n)) for n in (2, 9)])
        for group in groups_of([1.0, 1.0], [0.0, 0.0])
    ]
    assert warnings_of("dapo", [groups] * 2)
    assert not warnings_of("dapo", [groups] * 2, overlong_buffer_len=4)
    assert warnings_of("dapo", [groups] * 2, overlong_buffer_len=1)  # no answer is that long
    dropped = {"overlong_buffer_len": 4, "dynamic_sampling": True}
    assert warnings_of("dapo", [groups] * 2, **dropped)  # it compares the rewards themselves
