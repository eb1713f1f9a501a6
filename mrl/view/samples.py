"""Packs token records for the sample browser: few steps, few samples, bounded bytes.

d = old - rollout log-prob of a token. L MoE layers, E experts a layer, K experts a token, n tokens of a
sample. Row t of the routes routes token t as an input: it shapes the log-probs of the tokens after it.

Routes are bytes in base64: u8 up to 255 experts, else little-endian u16; the largest value says that no
route was captured.
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

EXTREME = 0.6931471805599453
"""The |d| above which the ratio exp(d) is outside [1/2, 2]."""

MAX_TEXT = 60
"""Characters of the prompt, and of the completion, in the list of samples: their ends tell most."""


def pack_step(
    record: TokenRecord, rows: Sequence[dict[str, Any]], max_samples: int, max_bytes: int
) -> dict[str, Any]:
    """Pack one step for the page. `rows` are the lines of its rollouts/step_*.jsonl, empty without
    them.

    The `max_samples` most telling samples, and of these as many as fit into `max_bytes`; routes are the
    first to go where a sample is too large.
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
    """Return the indices of at most `limit` samples, in turn from four rankings.

    Largest max |d|, largest |advantage|, highest and lowest reward; those in between would be the same
    story. Samples without a reward come last in the rankings by reward.
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
    """Return bool[n, L]: whether the set of experts is another than the trainer's router would choose.

    False where no route was captured.
    """
    assert record.expert_ids is not None
    assert record.native_ids is not None
    captured, native = record.expert_ids[tokens], record.native_ids[tokens]
    differs = (captured.sort(-1).values != native.sort(-1).values).any(-1)
    return differs & (captured[..., 0] != NATIVE_ROUTE)


def _summary(record: TokenRecord, i: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the list of samples shows, and what it is sorted by."""
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
        "text": _text(row),
    }


def _text(row: dict[str, Any]) -> str | None:
    """Return the ends of prompt and completion that the list has room for; None without them."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list):  # messages: the last one is the question
        prompt = prompt[-1].get("content") if prompt and isinstance(prompt[-1], dict) else None
    if prompt is None and completion is None:
        return None
    asked, answered = (" ".join(str(part or "").split()) for part in (prompt, completion))
    asked = asked if len(asked) <= MAX_TEXT else f"...{asked[-MAX_TEXT:]}"
    answered = answered if len(answered) <= MAX_TEXT else f"...{answered[-MAX_TEXT:]}"
    return f"{asked} \u2192 {answered}"


def _tokens(record: TokenRecord, i: int) -> dict[str, Any]:
    """Return numbers of each token. The old log-prob is rollout + `d`, so a tiny `d` keeps its
    digits."""
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
    """Return the captured routes of every token, and where they differ the router's choice and
    margin."""
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
    """Return [L][E]: the tokens of the record that the engine sent to each expert."""
    if record.expert_ids is None:
        return []
    loads = []
    for layer in range(len(record.layer_numbers)):
        ids = record.expert_ids[:, layer].flatten().long()
        loads.append(torch.bincount(ids[ids >= 0], minlength=record.num_experts).tolist())
    return loads


def _runs(values: Tensor) -> list[list[float | int | None]]:
    """Return [value, how often in a row], ...: masks, versions and advantages seldom change."""
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
    """Estimate the bytes in the page: a number is some eight characters."""
    return sum(
        len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list) else 20
        for value in packed.values()
    )
