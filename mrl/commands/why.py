"""`mrl why RUN STEP` explains why trainer and engine disagreed in a step, from its token record."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.diagnosis.why import Explanation

MAX_ROWS = 8
MAX_CHARS = 40
"""The largest number of characters that are printed of a question, and of its answer."""
MEASURES = {"logprob_abs_mean": "mean |d|", "k3": "k3", "extreme_share": "extreme"}
"""The measures of a decomposition, and their headings."""


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "why",
        help="explain the mismatch of a step: samples, tokens, layers, experts",
        description="Explain why trainer and engine disagreed in a step: which samples, tokens, layers "
        "and experts the mismatch comes from, and what to do. It reads RUN/tokens and RUN/diagnosis.",
    )
    command.add_argument("run_folder", type=Path, metavar="RUN", help="output_dir of a run")
    command.add_argument(
        "step",
        type=int,
        metavar="STEP",
        help="the step to explain, counted from 0 as in metrics.jsonl",
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    command.set_defaults(run=run, only_reads=True)


def run(args: argparse.Namespace) -> None:
    from mrl.run.compare import open_run

    folder = open_run(args.run_folder)
    from mrl.diagnosis.why import explain  # with torch

    found = explain(folder, args.step)
    if args.json:
        print(json.dumps(found.as_json(), allow_nan=False))
        return
    _show_numbers(found)
    _show_decomposition(found)
    if found.findings:
        _show_findings(found)
        _show_samples(found)
        _show_tokens(found)
        _show_layers(found)
        print(f"\ndiagnosis: {found.findings[0].name}: {found.findings[0].text}")
    print(f"next: {found.next}")


def _show_numbers(found: Explanation) -> None:
    """Print the metrics of the step. Spikes (values far above the metric's values in other steps)
    come first.

    Metrics of single layers are printed only if they are spikes.
    """
    if not found.numbers:
        print(f"step {found.step} has no numbers in metrics.jsonl: it failed, or is not done yet")
    numbers = sorted(found.numbers, key=lambda number: not number.is_spike)
    rows = [
        (n.key, f"{n.value:.4g}", _number(n.median), _number(n.ratio), "spike" * n.is_spike)
        for n in numbers
        if n.is_spike or "/layer_" not in n.key
    ]
    header = ("metric", f"step {found.step}", "median of others", "ratio", "")
    _table(f"Step {found.step} against the other steps", header, rows, limit=40)


def _show_decomposition(found: Explanation) -> None:
    """Print the levels of the step's decomposition, and the parts of the gap by cause."""
    from mrl.run.gap_parts import LEVELS, quantization_in_words

    if found.decomposition is None:
        return
    levels, parts = found.decomposition["levels"], found.decomposition["parts"]
    rows = [
        (LEVELS.get(level) or level, *(_number(values.get(name)) for name in MEASURES))
        for level, values in levels.items()
    ]
    header = ("the trainer has of the engine", *MEASURES.values())
    _table(f"Gap by what is replayed, {found.decomposition['num_tokens']} tokens", header, rows)
    causes = list(parts.get("logprob_abs_mean", ()))
    rows = [
        (text, *(_number(parts[name].get(cause)) for cause in causes))
        for name, text in MEASURES.items()
        if name in parts
    ]
    _table("Gap by cause", ("measure", *causes), rows)
    if text := quantization_in_words(levels):
        print(text)


def _show_findings(found: Explanation) -> None:
    rows = [(f.name, f"{f.severity:.3f}", f.text) for f in found.findings]
    _table("Findings, the diagnosis first", ("finding", "severity", ""), rows)


def _show_samples(found: Explanation) -> None:
    rows = [
        (
            f"{s['sample']}",
            f"{s['share']:.1%}",
            f"{s['mean_abs']:.2g}",
            f"{s['sequence_ratio']:.3g}",
            f"{s['num_tokens']}",
            _number(s.get("reward")),
            f"{s['advantage']:.2g}",
            _excerpt(s),
        )
        for s in found.samples
    ]
    header = ("sample", "of d^2", "mean |d|", "seq. ratio", "tokens", "reward", "adv.", "text")
    _table("Worst samples (d = old - rollout log-prob)", header, rows)


def _show_tokens(found: Explanation) -> None:
    rows = [
        (
            f"{t['sample']}",
            f"{t['position']}",
            f"{t['old_logprob'] - t['rollout_logprob']:+.3g}",
            f"{t['old_logprob']:.3f}",
            f"{t['rollout_logprob']:.3f}",
            f"{t['entropy']:.2f}",
            f"{t['weight_version']}",
            f"{t['before']}[{t['piece']}]",
        )
        for t in found.tokens
    ]
    header = ("sample", "at", "d", "old", "rollout", "entropy", "version", "text[token]")
    _table("Worst tokens", header, rows)


def _show_layers(found: Explanation) -> None:
    layers = sorted(found.layers, key=lambda layer: -layer.get("worst_expert_z", 0.0))
    rows = [
        (
            f"{layer['number']}",
            f"{layer['disagreement']:.2%}",
            _number(layer["margin"]),
            _number(layer["margin_at_disagreement"]),
            f"{layer.get('worst_expert', '-')}",
            _number(layer.get("worst_expert_z")),
            _number(layer.get("worst_expert_mean_abs")),
            _number(layer.get("median_expert_mean_abs")),
            _number(layer.get("hidden_rel_diff")),
            _number(layer.get("gap_without")),
        )
        for layer in layers
    ]
    header = ("layer", "reroute", "margin", "at reroute", "worst expert", "its z", "its mean |d|",
              "median expert", "hidden diff", "gap without")  # fmt: skip
    _table("Layers, by the expert whose tokens differ most", header, rows)


def _table(
    title: str, header: tuple[str, ...], rows: list[tuple[str, ...]], limit: int = MAX_ROWS
) -> None:
    from mrl.run import console

    if rows:
        console.table(title, header, rows[:limit])


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def _excerpt(sample: dict[str, Any]) -> str:
    """Return the end of the question of a sample and the beginning of its answer; empty if the
    rollouts of the step were not saved."""
    from mrl.run.rollout_rows import conversation

    if sample.get("prompt") is None:
        return ""
    turns = [text for _, text in conversation(sample["prompt"], sample.get("completion") or "")]
    asked, answered = turns[-2] if len(turns) > 1 else "", turns[-1]
    asked = asked if len(asked) <= MAX_CHARS else f"...{asked[3 - MAX_CHARS :]}"
    answered = answered if len(answered) <= MAX_CHARS else f"{answered[: MAX_CHARS - 3]}..."
    return f"{asked} -> {answered}"
