"""Samples and groups made by hand, for tests that need no engine and no model."""

from __future__ import annotations

import torch

from mrl.types import Prompt, Sample, SampleGroup, VersionSpan

PROMPT_LEN = 2


def sample(length: int, reason: str = "stop", group_id: int = 0) -> Sample:
    total = PROMPT_LEN + length
    return Sample(
        group_id=group_id,
        token_ids=torch.arange(total),
        prompt_len=PROMPT_LEN,
        loss_mask=torch.arange(total) >= PROMPT_LEN,
        rollout_logprobs=torch.zeros(total),
        weight_versions=(VersionSpan(0, PROMPT_LEN, total),),
        finish_reason=reason,
    )


def prompt(number: int) -> Prompt:
    return Prompt(str(number), torch.arange(PROMPT_LEN), "?", {}, f"prompts:{number}")


def group(rewards: list[float], group_id: int = 0, *samples: Sample) -> SampleGroup:
    own = samples or [sample(4, group_id=group_id) for _ in rewards]
    return SampleGroup(prompt(group_id), list(own), torch.tensor(rewards))
