"""What a step measures of its samples, the same on every rank. See also mrl.diagnosis.mismatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrl.algorithms.signal import zero_signal_metrics
from mrl.types import Sample, SampleGroup


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Rewards and lengths of all groups. Samples without a reward do not count in the rewards.

    Lengths are of what the policy generated: what it was told between turns does not count.
    """
    all_rewards = [g.rewards for g in groups if g.rewards is not None]
    rewards = torch.cat(all_rewards)
    known = rewards[~rewards.isnan()].double()
    lengths = torch.tensor([s.num_generated for g in groups for s in g.samples]).double()
    return {
        "reward/mean": float(known.mean()) if len(known) else float("nan"),
        "reward/std": float(known.std(correction=0)) if len(known) else float("nan"),
        "reward/abstained": float(rewards.isnan().sum()),
        **zero_signal_metrics(all_rewards),
        "response_len/mean": float(lengths.mean()),
        "tokens/rollout": float(lengths.sum()),
        "tokens/train": float(sum(len(s.token_ids) for g in groups for s in g.samples)),
    }


def episode_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Of conversations: turns of the policy, and tokens after the prompt that are not the policy's.

    Both are means over samples, those without a reward too.
    """
    samples = [sample for group in groups for sample in group.samples]
    turns = torch.tensor([_num_turns(s) for s in samples]).double()
    told = torch.tensor([len(s.response_ids) - s.num_generated for s in samples]).double()
    return {"episode/num_turns": float(turns.mean()), "episode/tool_tokens": float(told.mean())}


def _num_turns(sample: Sample) -> int:
    """Runs of tokens of the policy; one may hold several weight versions."""
    spans = [span for span in sample.weight_versions if span.end > span.start]
    ends = [None, *(span.end for span in spans)]
    return sum(span.start != end for span, end in zip(spans, ends, strict=False))
