"""Find loss tokens for which trainer or engine has a log-prob that is NaN or infinite.

The other detectors skip these tokens.
"""

from __future__ import annotations

from mrl.diagnosis.detectors.base import MAX_LISTED, Finding, LossTokens


def detect(tokens: LossTokens) -> Finding | None:
    """Report the loss tokens for which trainer or engine has a log-prob that is NaN or infinite."""
    record = tokens.record
    old, rollout = (
        ~values.isfinite() & record.loss_mask
        for values in (record.old_logprobs, record.rollout_logprobs)
    )
    places = (old | rollout).nonzero().squeeze(1)
    if not len(places):
        return None
    samples = tokens.sample_of(places)
    numbers = record.sample_ids[samples]
    named = numbers.unique().tolist()
    some = ", ".join(map(str, named[:MAX_LISTED])) + ("..." if len(named) > MAX_LISTED else "")
    return Finding(
        name="not_finite",
        severity=1.0,
        text=(
            f"{len(places)} of {int(record.loss_mask.sum())} loss tokens have a log-prob that is not "
            f"finite ({int(old.sum())} the trainer's, {int(rollout.sum())} the engine's), in samples "
            f"{some}"
        ),
        where={
            "samples": named,
            "tokens": [
                {"sample": number, "position": position}
                for number, position in zip(
                    numbers[:MAX_LISTED].tolist(),
                    (places - record.cu_seqlens[samples])[:MAX_LISTED].tolist(),
                    strict=True,
                )
            ],
        },
        is_cause=True,
    )
