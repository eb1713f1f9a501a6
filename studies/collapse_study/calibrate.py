"""Find how strong the noise on the engine's routers must be: `... calibrate FOLDER`, a JSON on stdin.

The JSON has a job and rates. For each rate the scale of the noise is found at which
`routing/disagreement` of the start model's rollout has that value. It is what mrl reports under R3: the
share of choices (K for each token and layer) that the trainer's router would not have made, with the
layers before it replayed. FOLDER/calibration.json gets {"scales": {rate: scale}, "measured": [[scale,
rate], ...]}.

The process becomes a rank with an engine of its own.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies.collapse_study.arms import ROOT, TOLERANCE
from studies.stability_study.arms import Job

FIRST_SCALE = 0.1
MOST_TRIES = 16
Pair = tuple[float, float]
"""A scale, and the rate that was measured with it."""


def find_scale(
    measure: Callable[[float], float], wanted: float, known: Sequence[Pair] = ()
) -> float:
    """Return a scale for which `measure` gives `wanted`, to TOLERANCE.

    `measure` must grow with the scale. `known` are pairs (scale, rate) that were measured before. The
    scale is bracketed, and then looked for in the bracket on logarithmic axes: between the ends in
    turn by a straight line and in the middle. Raises RuntimeError after MOST_TRIES measurements.
    """
    close = [s for s, rate in known if abs(rate / wanted - 1) <= TOLERANCE]
    if close:
        return close[0]
    low = max((pair for pair in known if pair[0] > 0 and 0 < pair[1] < wanted), default=None)
    high = min((pair for pair in known if pair[1] > wanted), default=None)
    for number in range(MOST_TRIES):
        scale = _next_scale(low, high, wanted, halve=number % 2 > 0)
        rate = measure(scale)
        if abs(rate / wanted - 1) <= TOLERANCE:
            return scale
        if rate > wanted:
            high = (scale, rate)
        else:
            low = (scale, max(rate, wanted / 100))
    raise RuntimeError(
        f"no scale gives a rate of {wanted:g} to {TOLERANCE:.0%} after {MOST_TRIES} tries; the nearest "
        f"(scale, rate) below and above are {low} and {high}"
    )


def _next_scale(low: Pair | None, high: Pair | None, wanted: float, *, halve: bool) -> float:
    """Return the scale to try next, between the nearest pairs below and above, if both are known."""
    if low is None or high is None:
        known = low or high
        # The rate is about proportional to a small scale.
        factor = 1.0 if known is None else min(max(1.2 * wanted / known[1], 1 / 9), 9.0)
        if known is high and known is not None:
            factor /= 1.44
        return (FIRST_SCALE if known is None else known[0]) * factor
    share = 0.5
    if not halve:
        share = math.log(wanted / low[1]) / math.log(high[1] / low[1])
    return low[0] * (high[0] / low[0]) ** min(max(share, 0.1), 0.9)


def calibrated(folder: Path, job: Job, rates: Sequence[float]) -> dict[float, float]:
    """Return the scale of each rate from FOLDER/calibration.json, which a child process makes."""
    file = folder / "calibration.json"
    known = json.loads(file.read_text())["scales"] if file.exists() else {}
    if not {str(rate) for rate in rates} <= set(known):
        print("calibrating the disturbance", flush=True)
        module = "studies.collapse_study.calibrate"
        command = [sys.executable, "-W", "ignore", "-m", module, str(folder)]
        text = json.dumps({"job": asdict(job), "rates": list(rates)})
        with (folder / "calibration.log").open("w") as log:
            subprocess.run(
                command, input=text, text=True, check=True, cwd=ROOT, stdout=log, stderr=log
            )
    found = json.loads(file.read_text())
    return {0.0: 0.0} | {float(rate): scale for rate, scale in found["scales"].items()}


def calibrate(folder: Path, job: Job, rates: Sequence[float]) -> dict[str, Any]:
    """Start an engine, measure, and stop it. Returns what the file gets."""
    from parallel import prepare
    from studies.collapse_study.worker import disturb
    from studies.stability_study.runs import make_run, start_engine

    prepare()
    noise = disturb(folder / "noise_calibration")
    engine, mesh = start_engine(job)
    measured: list[Pair] = []
    try:
        run = make_run(job, mesh)
        run.begin(engine)
        roll = repeated(run)

        def measure(scale: float) -> float:
            noise.set(scale, 0)
            paired = run.both_ways(roll())
            measured.append((scale, paired["routes"]["disagreement"]))
            print(f"scale {scale:g}: rate {measured[-1][1]:g}, {paired}", flush=True)
            return measured[-1][1]

        measure(0.0)
        scales = {str(rate): find_scale(measure, rate, measured) for rate in sorted(rates)}
    finally:
        engine.stop()
    return {"scales": scales, "measured": measured}


def repeated(run: Any) -> Callable[[], list[Any]]:
    """Return a function that rolls out the next prompts of a `stability_study.runs.Run`, the same ones
    at each call, and returns their groups."""
    from tests.loop.stepped import collected, supply_of

    cursor = supply_of(run.collector).cursor
    state = cursor.state_dict()

    def roll() -> list[Any]:
        cursor.load_state_dict(state)
        return collected(run)

    return roll


def main() -> None:
    folder, given = Path(sys.argv[1]), json.load(sys.stdin)
    job = Job(**{**given["job"], "more": tuple(given["job"]["more"])})
    text = json.dumps(calibrate(folder, job, given["rates"]), indent=1)
    partial = folder / "calibration.partial"
    partial.write_text(text)
    partial.rename(folder / "calibration.json")


if __name__ == "__main__":
    main()
