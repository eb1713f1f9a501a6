"""Find the tokens and samples that account for most of the mismatch."""

from __future__ import annotations

import math
from typing import Any

import torch

from mrl.diagnosis.detectors.base import MAX_LISTED, MIN_TOKENS, Finding, LossTokens
from mrl.diagnosis.pieces import join_pieces

CONCENTRATED = 0.5
"""The mismatch is concentrated if the worst sample, or the worst 1% of the tokens, has at least this
share of the squared mismatch."""


def detect_tokens(tokens: LossTokens) -> Finding | None:
    """Report extreme tokens, or that few tokens account for most of the squared mismatch.

    A token is extreme if the ratio `exp(d)` of the trainer's probability to the engine's is outside
    [0.5, 2]. The 1% of the tokens with the largest `|d|` are reported if their share of the squared
    mismatch is at least CONCENTRATED. Returns None for fewer than MIN_TOKENS loss tokens.
    """
    num, d = len(tokens.d), tokens.d.abs()
    if num < MIN_TOKENS or not tokens.square_sum:
        return None
    extreme = d > math.log(2)
    worst = d.topk(max(1, num // 100)).indices
    share = float(tokens.d[worst].square().sum()) / tokens.square_sum
    if not extreme.any() and share < CONCENTRATED:
        return None
    return Finding(
        name="extreme_tokens",
        severity=tokens.severity(share),
        text=(
            f"{int(extreme.sum())} of {num} loss tokens have a ratio exp(old - rollout) outside [0.5, "
            f"2]; the worst {len(worst)} hold {share:.0%} of the squared mismatch"
        ),
        where={"tokens": worst_tokens(tokens)},
    )


def detect_samples(tokens: LossTokens) -> Finding | None:
    """Report the sample that accounts for most of the squared mismatch, if there is one.

    The sample's share of the squared mismatch must be at least CONCENTRATED, and at least three
    times the sample's share of the loss tokens.
    """
    if not tokens.square_sum:
        return None
    by_sample = torch.bincount(tokens.sample, tokens.d.square())
    counts = torch.bincount(tokens.sample)
    worst = int(by_sample.argmax())
    share = float(by_sample[worst]) / tokens.square_sum
    token_share = int(counts[worst]) / len(tokens.d)
    if share < CONCENTRATED or share < 3 * token_share:
        return None
    number = int(tokens.record.sample_ids[worst])
    return Finding(
        name="extreme_sample",
        severity=tokens.severity(share),
        text=(
            f"sample {number} holds {share:.0%} of the squared mismatch with {token_share:.0%} of the "
            "loss tokens"
        ),
        where={"samples": [number]},
    )


def worst_tokens(tokens: LossTokens) -> list[dict[str, Any]]:
    """Return one JSON-able entry for each of the MAX_LISTED loss tokens with the largest mismatch.

    The mismatch of a token is `|d|`, the absolute difference between the log-probs of trainer and
    engine. The token with the largest mismatch comes first.
    """
    record, rows = tokens.record, []
    for i in tokens.d.abs().topk(min(MAX_LISTED, len(tokens.d))).indices.tolist():
        place, sample = int(tokens.index[i]), int(tokens.sample[i])
        token = int(record.token_ids[place])
        start = int(record.cu_seqlens[sample])
        rows.append(
            {
                "sample": int(record.sample_ids[sample]),
                "position": place - start,
                "token_id": token,
                "piece": record.pieces.get(token, ""),
                "before": text_of(record.token_ids[max(start, place - 8) : place], record.pieces),
                "old_logprob": float(record.old_logprobs[place]),
                "rollout_logprob": float(record.rollout_logprobs[place]),
                "entropy": float(record.entropy[place]),
                "advantage": float(record.advantages[place]),
                "weight_version": int(record.weight_versions[place]),
            }
        )
    return rows


def worst_samples(tokens: LossTokens) -> list[dict[str, Any]]:
    """Return one JSON-able entry for each of the MAX_LISTED samples with the largest squared mismatch.

    The squared mismatch of a sample is the sum of the squared log-prob differences of its loss
    tokens. The sample with the largest sum comes first. Samples without loss tokens are left out.
    """
    if not len(tokens.d):
        return []
    record, num = tokens.record, tokens.record.num_samples
    counts = torch.bincount(tokens.sample, minlength=num)
    squares = torch.bincount(tokens.sample, tokens.d.square(), minlength=num)
    sums = torch.bincount(tokens.sample, tokens.d, minlength=num)
    absolute = torch.bincount(tokens.sample, tokens.d.abs(), minlength=num)
    rows = []
    for i in squares.argsort(descending=True)[:MAX_LISTED].tolist():
        if not counts[i]:
            continue
        count = int(counts[i])
        rows.append(
            {
                "sample": int(record.sample_ids[i]),
                "num_tokens": count,
                "mean_abs": float(absolute[i]) / count,
                "sequence_ratio": math.exp(min(50.0, float(sums[i]) / count)),
                "share": float(squares[i]) / max(tokens.square_sum, 1e-300),
                "advantage": float(record.advantages[tokens.index[tokens.sample == i][0]]),
            }
        )
    return rows


def text_of(token_ids: torch.Tensor, pieces: Any) -> str:
    """Return the text of token ids i64[n].

    pieces: the text of each token id; an id without an entry adds no text.
    """
    return join_pieces(pieces.get(token, "") for token in token_ids.tolist())
