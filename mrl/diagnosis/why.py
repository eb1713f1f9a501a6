"""One step of a run explained: its numbers against the other steps, the findings, and what is behind.

Read from metrics.jsonl, tokens/step_*.safetensors, diagnosis/step_*.json and rollouts/step_*.jsonl.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.diagnosis.decomposition import read_decomposition
from mrl.diagnosis.detectors.base import Finding, LossTokens
from mrl.diagnosis.detectors.extremes import worst_samples, worst_tokens
from mrl.diagnosis.detectors.router import expert_gaps, layer_routes
from mrl.diagnosis.detectors.stale_expert import expert_z
from mrl.diagnosis.findings import find, usual_mismatch
from mrl.diagnosis.tokens import TokenRecord, load_tokens
from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.run.json_lines import finite_or_null
from mrl.system.json_text import is_number

PREFIXES = ("mismatch/", "decompose/", "routing/disagreement", "routing/token_any_layer",
            "routing/margin", "ratio/", "staleness/", "guard/", "moe/load_max")  # fmt: skip
ALONE = ("reward/mean", "entropy", "grad_norm", "loss/total", "rollout/canary_abs_mean")
SPIKE = 3.0
"""Times the median of the other steps, from where a number is marked."""
NOISE = 1e-5
"""A smaller number does not count as a spike, whatever its ratio: sums of float32 in another order
differ by as much."""

NEXT = {
    "not_finite": "the update was refused, so the weights are those of the steps before: read their "
    "grad_norm, ratio/max and entropy (mrl view), and the samples above; an infinite log-prob of the "
    "engine is a token that it calls impossible",
    "shifted_routes": "the engine's rows and the trainer's are not aligned: compare moe/trace.py with "
    "what this SGLang version returns; until then moe.routing_replay=r2 needs no captured routes",
    "temperature": "compare rollout.temperature with what the engine samples and reports at "
    "(rollout.server_args, a custom engine)",
    "stale_expert": "the engine holds other weights for this expert: turn the canaries on "
    "(rollout.canary_prompts=4) and look at the export of that layer (mrl export, a custom engine)",
    "stale_weights": "tokens of older versions: rollout.partial_rollouts=drop, or algorithm.importance "
    "corrects them; of the right version: turn the canaries on (rollout.canary_prompts=4)",
    "router_disagreement": "replay the rollout's routes: moe.routing_replay=r3",
    "extreme_tokens": "read the tokens below; a correction bounds their weight: algorithm.importance",
    "extreme_sample": "read the sample below; its routes or its cache may be another request's",
    "unexplained": "mrl check shows the versions of both sides; rollout.canary_prompts=4 compares the "
    "models after every sync",
    "noise": "nothing to mend; routing replay (moe.routing_replay=r3) and algorithm.importance "
    "bound it",
    "nothing_wrong": "look elsewhere: rewards, advantages, the learning rate",
    "no_tokens": "no token of the step takes part in the loss: look at the rewards; where all samples "
    "are longer than diagnosis.max_tokens, raise it",
}
REPLAYED = {
    "router_disagreement": "the routes are replayed (moe.routing_replay=r3), so this is what replay "
    "bounds; what is left of the gap is in decompose/ids",
    "noise": "nothing to mend; routes are replayed already, algorithm.importance bounds the rest",
}
"""The step that takes the place of NEXT where the routes were the rollout's."""


@dataclass(frozen=True)
class Number:
    """A number is one metric of the step."""

    key: str
    value: float
    median: float | None
    """Its median over the other steps that have it; None without one."""

    @property
    def ratio(self) -> float | None:
        if self.median is None or self.median == self.value == 0:
            return None
        return self.value / self.median if self.median else math.inf

    @property
    def is_spike(self) -> bool:
        is_large = self.ratio is not None and abs(self.ratio) >= SPIKE
        return is_large and abs(self.value) >= NOISE


@dataclass(frozen=True)
class Explanation:
    step: int
    numbers: list[Number]
    """Empty of a step that did not end."""
    findings: list[Finding]
    """The first is the diagnosis; empty without a token record."""
    samples: list[dict[str, Any]]
    """Worst first, with prompt, completion and reward where they are on file."""
    tokens: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    decomposition: dict[str, Any] | None
    """diagnosis/step_*.json, if the step has one."""
    next: str
    """What to do about the diagnosis."""

    def as_json(self) -> dict[str, Any]:
        """Return JSON with null for non-finite numbers, and `ratio` and `is_spike` beside `numbers`."""
        numbers = [
            {**dataclasses.asdict(n), "ratio": n.ratio, "is_spike": n.is_spike}
            for n in self.numbers
        ]
        return finite_or_null({**dataclasses.asdict(self), "numbers": numbers})


def explain(run: RunFolder, step: int) -> Explanation:
    """A step that died has no line in metrics.jsonl, but a token record.

    Raises InputError where the run has no such step, or its record cannot be read.
    """
    rows, path = run.read_metrics(), run.token_file(step)
    row = next((row for row in rows if row["step"] == step), {})
    if not row and not path.is_file():
        last = max((row["step"] for row in rows), default=None)
        there = "none" if last is None else f"0 to {last}"
        raise InputError(
            f"{run.root} has no step {step} in metrics.jsonl, which holds {there}, and no {path.name}"
        )
    numbers = step_numbers(row, [r for r in rows if r["step"] != step])
    measured = run.diagnosis_file(step)
    decomposition = read_decomposition(measured) if measured.is_file() else None
    if not path.is_file():
        missing = (
            f"there is no token record of step {step} ({path}): diagnosis.save_tokens_every=1 writes "
            f"one every step, and `mrl replay {run.root} {step}` makes one where rollouts were saved"
        )
        return Explanation(step, numbers, [], [], [], [], decomposition, missing)
    record = load_tokens(path)
    tokens, findings = LossTokens(record), find(record, usual_mismatch(rows, step))
    return Explanation(
        step,
        numbers,
        findings,
        _with_texts(worst_samples(tokens), run, step),
        worst_tokens(tokens),
        _layers(record, tokens, decomposition),
        decomposition,
        _next(findings[0], record),
    )


def _next(diagnosis: Finding, record: TokenRecord) -> str:
    replayed = record.routing_replay == "r3"
    return (REPLAYED if replayed else {}).get(diagnosis.name) or NEXT[diagnosis.name]


def step_numbers(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[Number]:
    """Return the metrics of mismatch, routing and update, beside their median over `others`."""
    numbers = []
    for key, value in row.items():
        if not (key.startswith(PREFIXES) or key in ALONE) or not is_number(value):
            continue
        known = [r[key] for r in others if is_number(r.get(key))]
        numbers.append(Number(key, value, statistics.median(known) if known else None))
    return numbers


def _layers(
    record: TokenRecord, tokens: LossTokens, decomposition: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Report, by MoE layer, router disagreement, margins, and the expert whose tokens differ
    most from others of about the same log-prob."""
    gaps, z = expert_gaps(tokens), expert_z(tokens)
    parts = {part["layer"]: part for part in (decomposition or {}).get("layers", ())}
    layers = []
    for i, layer in enumerate(layer_routes(record)):
        entry: dict[str, Any] = dataclasses.asdict(layer) | dict(parts.get(layer.number, {}))
        entry.pop("layer", None)
        if gaps is not None and z is not None:
            worst = int(z[i].argmax())
            entry["worst_expert"], entry["worst_expert_z"] = worst, float(z[i, worst])
            entry["worst_expert_mean_abs"] = float(gaps[i, worst])
            entry["median_expert_mean_abs"] = float(gaps[i][~gaps[i].isnan()].median())
        layers.append(entry)
    return layers


def _with_texts(samples: list[dict[str, Any]], run: RunFolder, step: int) -> list[dict[str, Any]]:
    if not run.rollout_file(step).is_file():
        return samples
    rows = run.read_rollouts(step)
    keys = ("prompt", "completion", "reward", "finish_reason", "weight_version")
    return [
        sample | {k: rows[sample["sample"]].get(k) for k in keys}
        if sample["sample"] < len(rows)
        else sample
        for sample in samples
    ]
