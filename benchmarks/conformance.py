"""This module checks a real engine against the contract of an engine: `make conformance`.

It runs tests/rollout/conformance once for each case: engines of one and two tensor-parallel ranks, one
and two engines side by side, an engine whose two ranks are on two "nodes", which are processes of
this machine that meet on loopback, and one rank for each architecture beside the toy's. `--cases`
chooses among them by name. `--engine MODULE` puts another engine than SGLang to the test: any name that
`rollout.engine` takes. Writes runs/results/conformance.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from benchmarks.evidence.result import finish, summary, write_result

ROOT = Path(__file__).resolve().parents[1]
SUITE = "tests/rollout/conformance"


class Case(NamedTuple):
    """A case says which engines are under test."""

    tensor_parallel_size: int = 1
    num_engines: int = 1
    num_nodes: int = 1
    """That an engine spans."""
    expert_parallel_size: int = 1
    data_parallel_attention_size: int = 1
    model: str = ""
    """The architecture, one of tests/parallel/models.py; empty is the toy, a Qwen3-MoE."""


CASES = {
    "tp1": Case(),
    "tp1-two": Case(num_engines=2),
    "tp2": Case(2),
    "tp2-two": Case(2, num_engines=2),
    "tp2-nodes": Case(2, num_nodes=2),
    **{
        name: Case(model=name)
        for name in (
            "qwen3",
            "qwen2",
            "llama",
            "qwen2_moe",
            "mixtral",
            "olmoe",
            "glm4_moe",
            "gpt_oss",
        )
    },
    "tp2-experts": Case(2, expert_parallel_size=2),
    "tp2-attention": Case(2, data_parallel_attention_size=2),
}
DEFAULT = tuple(name for name in CASES if name not in ("tp2-experts", "tp2-attention"))
"""The others do not pass on CPUs yet (docs/rollout.md)."""


def run_suite(engine: str, gpus: str, server_args: str, case: Case) -> dict[str, Any]:
    """Run pytest once, with SGLang's own `server_args` as JSON.

    Return its counts, its seconds and the names of what failed.
    """
    environment = {
        **os.environ,
        "MRL_TEST_REAL_STARTS": "1",  # each server is a new Python, as in a run
        "OMP_NUM_THREADS": "1",
        "MRL_CONFORMANCE_ENGINE": engine,
        "MRL_CONFORMANCE_GPUS": gpus,
        "MRL_CONFORMANCE_SERVER_ARGS": server_args,
        "MRL_CONFORMANCE_TP": str(case.tensor_parallel_size),
        "MRL_CONFORMANCE_ENGINES": str(case.num_engines),
        "MRL_CONFORMANCE_NODES": str(case.num_nodes),
        "MRL_CONFORMANCE_EP": str(case.expert_parallel_size),
        "MRL_CONFORMANCE_MODEL": case.model,
        "MRL_CONFORMANCE_DP": str(case.data_parallel_attention_size),
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
        **case._asdict(),
        "passed": len(outcome) - len(failed) - len(skipped),
        "failed": failed,
        "skipped": skipped,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--engine", default="sglang", help="as rollout.engine in a recipe")
    parser.add_argument(
        "--gpus", default="", help="such as 0,1; engines of all sizes that fit on them"
    )
    parser.add_argument("--cases", default=",".join(DEFAULT), help=f"some of {','.join(CASES)}")
    parser.add_argument("--server-args", default="{}", help="JSON, as rollout.server_args")
    parser.add_argument("--output", type=Path, help="by default in runs/results")
    options = parser.parse_args()
    if unknown := set(options.cases.split(",")) - set(CASES):
        parser.error(f"--cases: got {sorted(unknown)}, expected some of {', '.join(CASES)}")
    engine = options.engine
    cases = {name: CASES[name] for name in options.cases.split(",")}
    if options.gpus:  # "nodes" of one machine would share its GPUs
        num_gpus = len(options.gpus.split(","))
        cases = {
            name: case
            for name, case in cases.items()
            if case.tensor_parallel_size <= num_gpus and case.num_nodes == 1
        }
    runs = []
    for name, case in cases.items():
        print(f"{name}: {case}", flush=True)
        runs.append({"case": name, **run_suite(engine, options.gpus, options.server_args, case)})
    num_failed = sum(len(run["failed"]) for run in runs)
    num_passed = sum(run["passed"] for run in runs)
    if set(cases) == set(DEFAULT) or options.gpus:  # only a whole run is written
        write_result(
            "conformance_gpu" if options.gpus else "conformance",
            {"engine": engine, "runs": runs},
            passed=num_passed,
            failed=num_failed,
            packages=("torch", "sglang", "transformers"),
            device=torch.device("cuda" if options.gpus else "cpu"),
            path=options.output,
        )
    finish(num_passed, num_failed)


if __name__ == "__main__":
    main()
