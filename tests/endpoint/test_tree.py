"""Groups whose samples are branches of episodes: their advantages, metrics and files."""

from __future__ import annotations

import torch

from mrl.algorithms import load_algorithm
from mrl.algorithms.episodes import of_episodes, of_samples
from mrl.config import AlgorithmConfig
from mrl.learn.advantages import compare_rewards
from mrl.learn.rollout_metrics import rollout_metrics
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.types import SampleGroup
from tests.endpoint.speaking import Speaking, make_record, tokenizer
from tests.endpoint.test_record import say, user

EPISODES = (0, 0, 0, 1, 2, 2)


def test_an_episode_counts_once_among_the_rewards_that_are_compared():
    config = AlgorithmConfig(name="grpo")
    algorithm, tokens = load_algorithm("grpo"), torch.ones(9, dtype=torch.int64)
    alone = torch.tensor([1.0, 0.0, 0.5])
    other = torch.tensor([1.0, 0.0, 0.0])
    expected = compare_rewards([alone, other], tokens, algorithm, config)
    rewards = [of_samples(alone, EPISODES), other]
    assert rewards[0].tolist() == [1, 1, 1, 0, 0.5, 0.5]
    assert torch.equal(of_episodes(rewards[0], EPISODES), alone)
    found = compare_rewards(rewards, tokens, algorithm, config, episodes=[EPISODES, None])
    assert torch.equal(found, torch.cat([of_samples(expected[:3], EPISODES), expected[3:]]))
    assert not torch.equal(found, compare_rewards(rewards, tokens, algorithm, config))


def test_metrics_and_files_of_a_group_of_branches():
    record = make_record(Speaking(tokenizer()))
    for text in "ab":
        say(record, [user(text)])
    branches = record.samples(3, is_tree=True)
    other = record.samples(3)
    group = SampleGroup(
        record.prompt, [*branches, *other], rewards=torch.tensor([1.0, 1.0, 0.0]),
        episodes=(0, 0, 1),
    )  # fmt: skip
    assert rollout_metrics([group])["reward/mean"] == 0.5
    (again,) = decode_groups(encode_groups([group]))
    assert again.episodes == (0, 0, 1)
    assert torch.equal(again.samples[1].loss_mask, branches[1].loss_mask)
    group.episodes = None
    (again,) = decode_groups(encode_groups([group]))
    assert again.episodes is None
