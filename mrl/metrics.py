"""What a step measures, as statistics of this rank; ranks are united by parallel.reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrl.types import Max, Mean, MicroBatch, SampleGroup, Statistics
from parallel.forward import PassOutput
from parallel.reduce import merge


def mismatch_statistics(batches: Sequence[MicroBatch], output: PassOutput) -> Statistics:
    """Trainer before the update against the rollout engine, on the tokens of the loss.

    d = old - rollout log-prob. `mismatch/k3` estimates KL(rollout || trainer) from the rollout's own
    samples by exp(d) - 1 - d (Schulman's k3). Empty where this rank holds no log-probs.
    """
    parts: list[Statistics] = []
    for batch, old, entropy in zip(batches, output.logprobs, output.entropies, strict=False):
        mask = batch.loss_mask.to(old.device)
        d = (old - batch.rollout_logprobs.to(old.device))[mask].double()
        count = mask.sum().double()
        part: Statistics = {
            "mismatch/logprob_abs_mean": Mean(d.abs().sum(), count),
            "mismatch/k3": Mean((d.expm1() - d).sum(), count),
            "entropy": Mean(entropy[mask].double().sum(), count),
        }
        if d.numel():
            part["mismatch/logprob_abs_max"] = Max(d.abs().max())
        parts.append(part)
    return merge(parts)


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Rewards and lengths of all groups. Samples without a reward do not count in the rewards.

    A group is zero-signal when its rewards are all equal: it teaches nothing.
    """
    all_rewards = [g.rewards for g in groups if g.rewards is not None]
    rewards = torch.cat(all_rewards)
    known = rewards[~rewards.isnan()].double()
    lengths = torch.tensor([len(s.response_ids) for g in groups for s in g.samples]).double()
    return {
        "reward/mean": float(known.mean()) if len(known) else float("nan"),
        "reward/std": float(known.std(correction=0)) if len(known) else float("nan"),
        "reward/abstained": float(rewards.isnan().sum()),
        "reward/zero_signal_groups": float(sum(_is_flat(r) for r in all_rewards)),
        "response_len/mean": float(lengths.mean()),
        "tokens/rollout": float(lengths.sum()),
        "tokens/train": float(sum(len(s.token_ids) for g in groups for s in g.samples)),
    }


def _is_flat(rewards: torch.Tensor) -> bool:
    known = rewards[~rewards.isnan()]
    return len(known) == 0 or bool((known == known[0]).all())
