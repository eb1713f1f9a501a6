"""Packs token records for the sample browser, with a limited number of samples and bytes.

Symbols: d, a token's old log-prob minus its rollout log-prob; L MoE layers; E experts per layer; K
experts per token; n tokens of a sample. A sample's routes are the experts that the engine's router
chose. Row t of the routes is for token t as an input, so it affects the log-probs of later tokens.

Routes are base64 of u8 if there are up to 255 experts, else of little-endian u16. The largest value
of this type means that no route was captured.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.diagnosis.tokens import TokenRecord
from mrl.types import NATIVE_ROUTE
from mrl.view.series import short
from mrl.view.texts import ends_of

EXTREME = 0.6931471805599453
"""ln 2. Let `d` be a token's old log-prob minus its rollout log-prob. If `|d|` is above ln 2, the
probability ratio `exp(d)` is outside [1/2, 2]."""


def pack_step(
    record: TokenRecord, rows: Sequence[dict[str, Any]], max_samples: int, max_bytes: int
) -> dict[str, Any]:
    """Pack one step for the page.

    The result has at most `max_samples` samples, in the order of `choose_samples`. A sample that
    would make the result exceed `max_bytes` loses its routes; if it is still too large, the sample
    is left out.

    rows: the rows of rollouts/step_*.jsonl; empty if they are missing.
    """
    summaries = [_summary(record, i, rows) for i in range(record.num_samples)]
    samples: list[dict[str, Any]] = []
    used = 0
    for i in choose_samples(summaries, max_samples):
        packed = summaries[i] | _tokens(record, i)
        routes = _routes(record, i)
        size, size_of_routes = _num_bytes(packed), _num_bytes(routes)
        if used + size > max_bytes:
            continue
        fits = used + size + size_of_routes <= max_bytes
        samples.append(packed | (routes if fits else {"routes_left_out": True}))
        used += size + (size_of_routes if fits else 0)
    ids = {token for sample in samples for token in sample["tokens"]}
    return {
        "step": record.step,
        "version": record.version,
        "temperature": record.temperature,
        "replay": record.routing_replay,
        "layers": list(record.layer_numbers),
        "num_experts": record.num_experts,
        "topk": 0 if record.expert_ids is None else record.expert_ids.shape[-1],
        "num_samples": record.num_samples_of_step,
        "num_recorded": record.num_samples,
        "pieces": {str(t): piece for t, piece in record.pieces.items() if t in ids},
        "samples": samples,
        "load": _load(record),
        "num_bytes": used,
    }


def choose_samples(summaries: Sequence[dict[str, Any]], limit: int) -> list[int]:
    """Choose at most `limit` samples in turn from four rankings, and return their indices.

    The first ranking is by the largest absolute difference between a token's old and rollout
    log-probs, the second by the largest absolute advantage. The third begins with the highest
    reward, the fourth with the lowest. Samples without a reward come last in the rankings by
    reward.
    """

    def ranked(key: str, sign: int, size: Callable[[float], float] = float) -> list[int]:
        def place(i: int) -> tuple[bool, float]:
            value = summaries[i][key]
            return (value is None, 0.0 if value is None else -sign * size(value))

        return sorted(range(len(summaries)), key=place)

    rankings = [ranked("max_d", 1), ranked("top_advantage", 1, abs), ranked("reward", 1),
                ranked("reward", -1)]  # fmt: skip
    turns = itertools.chain.from_iterable(zip(*rankings, strict=True))
    return list(dict.fromkeys(turns))[:limit]


def routes_differ(record: TokenRecord, tokens: slice) -> Tensor:
    """Return bool[n, L] for n tokens and L MoE layers: whether the set of experts captured from the
    engine differs from the set that the trainer's router chose.

    An entry is false for a token without a captured route.
    """
    assert record.expert_ids is not None
    assert record.native_ids is not None
    captured, native = record.expert_ids[tokens], record.native_ids[tokens]
    differs = (captured.sort(-1).values != native.sort(-1).values).any(-1)
    return differs & (captured[..., 0] != NATIVE_ROUTE)


def _summary(record: TokenRecord, i: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the i-th sample's values for the list of samples, which shows them and sorts by them."""
    tokens = record.sample(i)
    number = int(record.sample_ids[i])
    row = rows[number] if 0 <= number < len(rows) else {}
    mask = record.loss_mask[tokens]
    d = (record.old_logprobs[tokens] - record.rollout_logprobs[tokens])[mask].double()
    d = d[d.isfinite()]
    advantages = record.advantages[tokens][mask]
    largest = float(advantages[advantages.abs().argmax()]) if len(advantages) else None
    names = ("group_id", "prompt_id", "source", "finish_reason")
    return {
        "id": number,
        "num_tokens": tokens.stop - tokens.start,
        "num_loss_tokens": int(mask.sum()),
        "reward": short(row.get("reward"), 5),
        "top_advantage": short(largest, 5),
        "max_d": short(float(d.abs().max()), 4) if len(d) else None,
        "mean_d": short(float(d.abs().mean()), 4) if len(d) else None,
        "num_extreme": int((d.abs() > EXTREME).sum()),
        **{name: row.get(name) for name in names},
        "text": ends_of(row.get("prompt"), row.get("completion")),
    }


def _tokens(record: TokenRecord, i: int) -> dict[str, Any]:
    """Return the values of each token of the i-th sample.

    Instead of the old log-prob, the result has `d`, the old log-prob minus the rollout log-prob, so
    that a tiny difference keeps its digits.
    """
    tokens = record.sample(i)
    rollout, mask = record.rollout_logprobs[tokens], record.loss_mask[tokens]
    d = record.old_logprobs[tokens].double() - rollout.double()
    packed = {
        "tokens": record.token_ids[tokens].tolist(),
        "mask": _runs(mask.long()),
        "versions": _runs(record.weight_versions[tokens]),
        "rollout": _numbers(rollout, 6),
        "d": _numbers(d, 4),
        "entropy": _numbers(record.entropy[tokens], 4),
        "advantage": _runs(record.advantages[tokens]),
    }
    if record.ref_logprobs is not None:
        packed["ref"] = _numbers(record.ref_logprobs[tokens], 6)
    return packed


def _routes(record: TokenRecord, i: int) -> dict[str, Any]:
    """Return the captured routes of the i-th sample; {} if no routes were captured.

    Where the set of experts differs from the choice of the trainer's router, the result also has
    the router's choice, and its margin: the K-th highest minus the (K+1)-th highest score.
    """
    if record.expert_ids is None or record.native_ids is None:
        return {}
    tokens = record.sample(i)
    differs = routes_differ(record, tokens)
    flat = differs.flatten().nonzero().flatten()
    margins = torch.zeros(0) if record.margins is None else record.margins[tokens][differs]
    return {
        "routes": _bytes(record.expert_ids[tokens], record.num_experts),
        "differ_at": flat.tolist(),
        "native": _bytes(record.native_ids[tokens][differs], record.num_experts),
        "margins": _numbers(margins, 3),
    }


def _load(record: TokenRecord) -> list[list[int]]:
    """Return a list [L][E] of numbers of tokens: how many of the record's tokens the engine sent to
    each of the E experts of each of the L MoE layers.

    Returns [] if no routes were captured.
    """
    if record.expert_ids is None:
        return []
    loads = []
    for layer in range(len(record.layer_numbers)):
        ids = record.expert_ids[:, layer].flatten().long()
        loads.append(torch.bincount(ids[ids >= 0], minlength=record.num_experts).tolist())
    return loads


def _runs(values: Tensor) -> list[list[float | int | None]]:
    """Return the run-length encoding of the tensor `values` [n]: pairs [value, number of
    consecutive repetitions], with at least 1 repetition.

    The encoding is short for masks, versions and advantages, which seldom change.
    """
    return [
        [short(value, 5), sum(1 for _ in same)]
        for value, same in itertools.groupby(values.tolist())
    ]


def _numbers(values: Tensor, digits: int) -> list[float | int | None]:
    return [short(value, digits) for value in values.tolist()]


def _bytes(ids: Tensor, num_experts: int) -> str:
    dtype, none = ("<u1", 0xFF) if num_experts <= 0xFF else ("<u2", 0xFFFF)
    values = ids.to(torch.int32).numpy().copy()
    values[values < 0] = none
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _num_bytes(packed: dict[str, Any]) -> int:
    """Estimate the bytes of packed values in the page, at about eight characters per number."""
    return sum(
        len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list) else 20
        for value in packed.values()
    )
