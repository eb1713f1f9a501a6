"""Compute metrics of the samples of a step, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrl.algorithms.episodes import of_episodes
from mrl.algorithms.signal import part_means, zero_variance_metrics
from mrl.data.reader import metric_key
from mrl.types import Sample, SampleGroup


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return metrics of the rewards and lengths of all samples.

    Samples without a reward are left out of the reward statistics, in which an episode counts once.
    Lengths count the tokens that
    the policy generated, and not the tokens of an environment between the policy's turns.
    """
    all_rewards = [of_episodes(g.rewards, g.episodes) for g in groups if g.rewards is not None]
    rewards = torch.cat(all_rewards)
    known = rewards[~rewards.isnan()].double()
    samples = [sample for group in groups for sample in group.samples]
    lengths = torch.tensor([sample.num_generated for sample in samples]).double()
    num_truncated = sum(sample.finish_reason == "length" for sample in samples)
    return {
        "reward/mean": float(known.mean()) if len(known) else float("nan"),
        "reward/std": float(known.std(correction=0)) if len(known) else float("nan"),
        "reward/abstained": float(rewards.isnan().sum()),
        **part_means(groups),
        **zero_variance_metrics(all_rewards),
        "response_len/mean": float(lengths.mean()),
        "response_len/max": float(lengths.max()),
        "response_len/truncated": num_truncated / len(samples),
        "tokens/rollout": float(lengths.sum()),
        "tokens/train": float(sum(len(sample.token_ids) for sample in samples)),
    }


def source_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the metrics `source/NAME/...` of each data source that has a group in this step.

    NAME is the name of the source, with `_` in place of characters that trackers do not accept.
    Returns {} if the recipe has only one source.
    """
    of_source: dict[str, list[SampleGroup]] = {}
    for group in groups:
        if group.prompt.source_name is not None:
            key = metric_key(group.prompt.source_name)
            of_source.setdefault(key, []).append(group)
    metrics: dict[str, float] = {}
    for name, own in sorted(of_source.items()):
        whole = rollout_metrics(own)
        metrics |= {
            f"source/{name}/samples": float(sum(len(group.samples) for group in own)),
            f"source/{name}/reward_mean": whole["reward/mean"],
            f"source/{name}/reward_std": whole["reward/std"],
            f"source/{name}/unscored": whole["reward/abstained"],
            f"source/{name}/zero_variance_share": whole["reward/zero_signal_groups"] / len(own),
            f"source/{name}/response_len": whole["response_len/mean"],
            f"source/{name}/response_len_max": whole["response_len/max"],
            f"source/{name}/truncated": whole["response_len/truncated"],
        }
    return metrics


def episode_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return two means over the samples: of the number of policy turns, and of the number of
    environment tokens.

    Environment tokens are those after the prompt that the policy did not generate. Samples without
    a reward count, too.
    """
    samples = [sample for group in groups for sample in group.samples]
    turns = torch.tensor([_num_turns(s) for s in samples]).double()
    answered = torch.tensor([len(s.response_ids) - s.num_generated for s in samples]).double()
    return {"episode/num_turns": float(turns.mean()), "episode/tool_tokens": float(answered.mean())}


def _num_turns(sample: Sample) -> int:
    """Return the number of policy turns in a sample. A turn is an uninterrupted run of tokens that
    the policy generated.

    A turn may span several weight versions.
    """
    spans = [span for span in sample.weight_versions if span.end > span.start]
    ends = [None, *(span.end for span in spans)]
    return sum(span.start != end for span, end in zip(spans, ends, strict=False))
