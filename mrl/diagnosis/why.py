"""Explain one step of a run: what causes its mismatch, and which metrics differ from other steps.

The explanation is computed from metrics.jsonl, tokens/step_*.safetensors, diagnosis/step_*.json and
rollouts/step_*.jsonl.
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
KEYS = ("reward/mean", "entropy", "grad_norm", "loss/total", "rollout/canary_abs_mean")
"""The metrics that are shown in addition to those with one of the PREFIXES."""
SPIKE = 3.0
"""A metric is marked as a spike if it is at least this many times its median over the other steps."""
NOISE = 1e-5
"""A value smaller than this is never a spike, because float32 rounding alone may change a value
by this much."""

NEXT = {
    "not_finite": "the update did not happen, so the weights are those of the steps before: read their "
    "grad_norm, ratio/max and entropy (mrl view), and the samples above; an infinite log-prob of the "
    "engine means that it gave the token probability 0",
    "shifted_routes": "the engine's rows and the trainer's are not aligned: compare moe/trace.py with "
    "what this SGLang version returns; until then use moe.routing_replay=r2, which needs no captured "
    "routes",
    "temperature": "compare rollout.temperature with the temperature at which the engine samples and "
    "reports log-probs (rollout.server_args, a custom engine)",
    "stale_expert": "the engine has other weights for this expert: turn the canaries on "
    "(rollout.canary_prompts=4) and check the export of that layer (mrl export, a custom engine)",
    "stale_weights": "if the tokens are of older versions, set rollout.partial_rollouts=drop or "
    "correct them with algorithm.importance; if they are of the right version, turn the canaries on "
    "(rollout.canary_prompts=4)",
    "router_disagreement": "replay the rollout's routes: moe.routing_replay=r3",
    "extreme_tokens": "read the tokens below; algorithm.importance bounds their weight",
    "extreme_sample": "read the sample below; its routes or its cache may belong to another request",
    "unexplained": "mrl check shows the versions of both sides; rollout.canary_prompts=4 compares the "
    "models after every sync",
    "noise": "there is nothing to fix; algorithm.importance bounds the noise, and so does routing "
    "replay in a MoE (moe.routing_replay=r3)",
    "nothing_wrong": "engine and trainer agree: look at rewards, advantages and the learning rate",
    "no_tokens": "no token of the record is in the loss: look at the rewards; if all samples are "
    "longer than diagnosis.max_tokens, raise it",
}
"""The advice on what to do about each finding, by the name of the finding."""
NEXT_REPLAYED = {
    "router_disagreement": "the routes are replayed already (moe.routing_replay=r3), which bounds the "
    "effect of this disagreement; decompose/ids has the mismatch that is left",
    "noise": "there is nothing to fix; routes are replayed already, and algorithm.importance bounds "
    "what is left",
}
"""Advice by the name of the finding. If the trainer replayed the rollout's routes, this advice
replaces the advice in NEXT."""


@dataclass(frozen=True)
class Number:
    """A metric of the step, with its median over the other steps of the run."""

    key: str
    value: float
    median: float | None
    """The median over the other steps that have the metric; None if no other step has it."""

    @property
    def ratio(self) -> float | None:
        """The value divided by the median; inf if the median is 0 but the value is not.

        None if the median is None, or if the value and the median are both 0.
        """
        if self.median is None or self.median == self.value == 0:
            return None
        return self.value / self.median if self.median else math.inf

    @property
    def is_spike(self) -> bool:
        """Whether `|ratio|` is at least SPIKE and `|value|` at least NOISE; False without a ratio."""
        is_large = self.ratio is not None and abs(self.ratio) >= SPIKE
        return is_large and abs(self.value) >= NOISE


@dataclass(frozen=True)
class Explanation:
    """The explanation of a step, as `mrl why` prints it."""

    step: int
    numbers: list[Number]
    """The metrics of the step that are shown; empty if the step failed before its metrics were
    written."""
    findings: list[Finding]
    """All findings, of which the first is the diagnosis; empty if the step has no file
    tokens/step_*.safetensors."""
    samples: list[dict[str, Any]]
    """One entry for each of the samples with the largest mismatch, worst first. An entry includes the
    sample's prompt, completion and reward if the rollouts of the step were saved."""
    tokens: list[dict[str, Any]]
    """One entry for each of the tokens with the largest mismatch, worst first."""
    layers: list[dict[str, Any]]
    """One entry per MoE layer, with statistics of its router and its worst expert; empty without
    captured routes."""
    decomposition: dict[str, Any] | None
    """The content of diagnosis/step_*.json; None if the step was not decomposed."""
    next: str
    """Advice on what to do about the diagnosis or, if the step has no file
    tokens/step_*.safetensors, on how to write that file."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON-able values, with None in place of numbers that are not finite."""
        numbers = [
            {**dataclasses.asdict(n), "ratio": n.ratio, "is_spike": n.is_spike}
            for n in self.numbers
        ]
        return finite_or_null({**dataclasses.asdict(self), "numbers": numbers})


def explain(run: RunFolder, step: int) -> Explanation:
    """Explain the mismatch and the metrics of a step, from the files of the run.

    A failed step has no line in metrics.jsonl, but may have a token record (the file
    tokens/step_*.safetensors).

    Raises InputError if the run has neither a metrics line nor a token record of the step, or if a
    file of the step cannot be read.
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
    if record.routing_replay == "r3" and diagnosis.name in NEXT_REPLAYED:
        return NEXT_REPLAYED[diagnosis.name]
    return NEXT[diagnosis.name]


def step_numbers(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[Number]:
    """Return the metrics of `row` that are in KEYS or begin with one of the PREFIXES.

    others: the rows of the other steps; each metric is returned with its median over these rows.
    """
    numbers = []
    for key, value in row.items():
        if not (key.startswith(PREFIXES) or key in KEYS) or not is_number(value):
            continue
        known = [r[key] for r in others if is_number(r.get(key))]
        numbers.append(Number(key, value, statistics.median(known) if known else None))
    return numbers


def _layers(
    record: TokenRecord, tokens: LossTokens, decomposition: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return one entry per MoE layer, with router disagreement, router margins and worst expert.

    The worst expert is the one with the largest score in `expert_z`. An expert has a large score if
    its tokens have a larger mismatch than other tokens of about the same log-prob. If the step was
    decomposed, the entry also has the layer's part of the decomposition.
    """
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
    """Return `samples` with fields of each sample's rollout added: prompt, completion, reward, etc.

    Returns `samples` unchanged if the rollouts of the step were not saved.
    """
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
