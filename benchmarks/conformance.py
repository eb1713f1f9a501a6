"""The engine's contract against a real engine: `make conformance`.

Runs tests/rollout/conformance once for each size: tensor-parallel engines of one and two ranks, one
and two engines side by side. `--engine MODULE` puts another engine than SGLang to the test: any name
that `rollout.engine` takes. Writes benchmarks/results/conformance.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.kernel_bench.machine import describe

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "conformance.json"
SUITE = "tests/rollout/conformance"
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2)]
"""(ranks of an engine, engines)."""


def run_suite(engine: str, gpus: str, tp: int, num_engines: int) -> dict[str, Any]:
    """One pytest run; its counts, its seconds and the names of what failed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MRL_CONFORMANCE_ENGINE": engine,
        "MRL_CONFORMANCE_GPUS": gpus,
        "MRL_CONFORMANCE_TP": str(tp),
        "MRL_CONFORMANCE_ENGINES": str(num_engines),
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", SUITE]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"conformance: pytest ended with code {done.returncode}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        outcome = {case.attrib["name"]: {child.tag for child in case} for case in cases}
    failed = sorted(name for name, tags in outcome.items() if tags & {"failure", "error"})
    skipped = sorted(name for name, tags in outcome.items() if "skipped" in tags)
    return {
        "tensor_parallel_size": tp,
        "num_engines": num_engines,
        "passed": len(outcome) - len(failed) - len(skipped),
        "failed": failed,
        "skipped": skipped,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="sglang", help="as rollout.engine in a recipe")
    parser.add_argument(
        "--gpus", default="", help="such as 0,1; engines of all sizes that fit on them"
    )
    options = parser.parse_args()
    engine = options.engine
    sizes = [(tp, n) for tp, n in SIZES if not options.gpus or tp <= len(options.gpus.split(","))]
    machine, runs = describe(torch.device("cpu"), ["torch", "sglang", "transformers"]), []
    for tp, num_engines in sizes:
        print(f"{num_engines} engine(s) of {tp} rank(s)", flush=True)
        runs.append(run_suite(engine, options.gpus, tp, num_engines))
    num_failed = sum(len(run["failed"]) for run in runs)
    result = RESULT.with_stem("conformance_gpu") if options.gpus else RESULT
    result.write_text(json.dumps({**machine, "engine": engine, "runs": runs}, indent=2) + "\n")
    print(f"{sum(run['passed'] for run in runs)} passed, {num_failed} failed")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
