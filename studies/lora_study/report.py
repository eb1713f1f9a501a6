"""This module turns the results of all runs into checks, and into the part of docs/lora.md on them.

Pure functions of what `runs.train` returns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studies.lora_study.arms import ARMS, LARGE, NUM_LAST, NUM_STEPS, SEED, SWEEP_SEED

NOT_RUN = "The comparison has not been made yet. `make lora` makes it, and writes this part."
GAP, NEAR, UNTRAINED, LEARNED = 1e-4, 0.95, 0.3, 0.9
"""Bounds: of the log-probs, of the rewards' ratio, of the base's reward, of full training's."""
Result = Mapping[str, Any]


def end(result: Result) -> float:
    """Return the mean reward of the last steps."""
    return statistics.fmean(result["rewards"][-NUM_LAST:])


def second_half(result: Result) -> float:
    """Return the mean reward of the second half of the steps, by which a learning rate is chosen."""
    rewards = result["rewards"]
    return statistics.fmean(rewards[len(rewards) // 2 :])


def chosen_rates(results: Sequence[Result]) -> dict[str, float]:
    """Return the learning rate of each arm, given the runs that tried them."""
    return {
        arm: max(chosen(results, "base", SWEEP_SEED, arm), key=second_half)["rate"] for arm in ARMS
    }


def chosen(results: Sequence[Result], model: str, seed: int, arm: str) -> list[Result]:
    """Return the results of one model, seed and arm."""
    return [r for r in results if (r["model"], r["seed"], r["arm"]) == (model, seed, arm)]


def compared(results: Sequence[Result], model: str = "base") -> dict[str, Result]:
    """Return the two results of the comparison on a model, by arm."""
    return {arm: own[0] for arm in ARMS if (own := chosen(results, model, SEED, arm))}


def seconds(result: Result) -> tuple[float, float]:
    """Return the median seconds of a weight sync with its proof, and of the proof; not of the first."""
    rows = slice(1, None)
    return statistics.median(result["sync_s"][rows]), statistics.median(result["verify_s"][rows])


def checks(results: Sequence[Result], num_steps: int) -> dict[str, bool]:
    """Return what must hold. A shorter run than the whole has learned nothing, and is not asked to."""
    by, big = compared(results), compared(results, LARGE)
    full, lora = by["full"], by["lora"]
    gap, coverage = max(lora["gaps"]), min(lora["coverages"])
    found = {
        f"engine and trainer differ by at most {GAP:g} in every token of {len(lora['gaps'])} steps "
        f"(at most {gap:.1e})": gap <= GAP,
        f"the coverage of the replay is 1.0 in every step (at least {coverage})": coverage == 1.0,
        f"both arms have the same {lora['num_samples']} samples of the same prompts": (
            full["num_samples"],
            full["prompts"],
        )
        == (lora["num_samples"], lora["prompts"]),
    }
    for name, pair in (("toy", by), ("larger", big)):
        for arm, what in (("lora", "adapter"), ("full", "model")):
            bytes_, sent = pair[arm]["exported_bytes"], set(pair[arm]["sync_bytes"])
            text = f"every sync of the {name} model sends the bytes of its {what} ({bytes_:,})"
            found[text] = sent == {bytes_}
    if num_steps < NUM_STEPS:
        return found
    base, ratio = max(full["rewards"][0], lora["rewards"][0]), end(lora) / end(full)
    return found | {
        f"the base has a reward below {UNTRAINED} ({base:.3f})": base < UNTRAINED,
        f"training all weights reaches {LEARNED} ({end(full):.3f})": end(full) >= LEARNED,
        f"LoRA reaches {NEAR} of the reward of training all weights "
        f"({end(lora):.3f} / {end(full):.3f} = {ratio:.3f})": ratio >= NEAR,
    }


def page_part(result: Mapping[str, Any] | None) -> str:
    """Return what stands between the markers of the page; `result` is lora.json, if there is one."""
    if result is None:
        return NOT_RUN
    results = result["runs"]
    return "\n\n".join([_rewards(results), _syncs(results), "![reward of each step](lora.svg)"])


def _rewards(results: Sequence[Result]) -> str:
    rates, lines = chosen_rates(results), []
    for arm, about in ARMS.items():
        for tried in [*chosen(results, "base", SWEEP_SEED, arm), compared(results)[arm]]:
            is_compared = tried["seed"] == SEED
            what = "compared" if is_compared else "tried"
            if not is_compared and tried["rate"] == rates[arm]:
                what = "tried, and chosen"
            lines.append(
                [about.tells, f"{tried['rate']:g}", f"{tried['seed']}: {what}",
                 f"{tried['rewards'][0]:.3f}", f"{second_half(tried):.3f}", f"{end(tried):.3f}",
                 f"{max(tried['gaps']):.1e}", f"{min(tried['coverages'])}"]
            )  # fmt: skip
    heads = ["trained", "learning rate", "seed", "reward of the base", "second half",
             f"last {NUM_LAST} steps", "largest gap", "coverage"]  # fmt: skip
    return _table(heads, lines)


def _syncs(results: Sequence[Result]) -> str:
    lines = []
    for name, model in (("toy", "base"), ("larger", LARGE)):
        by = compared(results, model)
        full, lora = by["full"], by["lora"]
        (full_s, full_proof_s), (lora_s, lora_proof_s) = seconds(full), seconds(lora)
        sent = [each["sync_bytes"][-1] for each in (lora, full)]
        lines.append(
            [name, f"{sent[0]:,}", f"{sent[1]:,}", f"{sent[0] / sent[1]:.2f}",
             f"{(lora_s - lora_proof_s) / (full_s - full_proof_s):.2f}",
             f"{lora_proof_s / full_proof_s:.2f}", f"{lora_s / full_s:.2f}"]
        )  # fmt: skip
    heads = ["model", "bytes of the adapter", "bytes of all weights", "ratio",
             "seconds to send, ratio", "seconds to prove, ratio", "seconds in all, ratio"]  # fmt: skip
    return _table(heads, lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
