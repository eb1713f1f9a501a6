"""This module holds the parts of run.py that are test suites and benchmarks of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_lane.children import ROOT, run_child
from benchmarks.gpu_lane.parts import gpu_args, note

GPU_TESTS = ("tests/kernels/test_gpu.py",)
"""Every file with tests marked `gpu`. They are named, so that pytest imports no other file."""


def gpu_tests(folder: Path, device: str) -> dict[str, Any]:
    """Run every test marked `gpu`; this fails too where none of them ran."""
    report = folder / "gpu_tests.xml"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *GPU_TESTS]
    try:
        run_child([*command, f"--junitxml={report}"])
    finally:
        counts = count_cases(report)
        note(**counts)
    assert counts["passed"], f"no test ran: {counts}"
    return {"says": f"{counts['passed']} passed, {len(counts['skipped'])} skipped"}


def count_cases(report: Path) -> dict[str, Any]:
    """Return how many cases of a junit file passed, and the names of the others; empty where there
    is no file.
    """
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    if not report.is_file():
        return found
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            found["failed"].append(case.attrib["name"])
        elif "skipped" in tags:
            found["skipped"].append(case.attrib["name"])
        else:
            found["passed"] += 1
    return found


def kernels(folder: Path, device: str) -> dict[str, Any]:
    """Time every kernel beside eager and a copy; the whole tables go to results/, too."""
    output = folder / f"kernels_{device}.json"
    quick = ["--quick"] if device == "cpu" else []
    command = ["-m", "benchmarks.bench_kernels", "--device", device, "--output", str(output)]
    run_child([*command, *quick])
    rows = json.loads(output.read_text())["cases"]
    note(cases=rows)
    if device == "cuda":
        from torch import device as torch_device

        from benchmarks.bench_kernels import result_name
        from benchmarks.evidence.result import RESULTS

        shutil.copyfile(output, RESULTS / f"{result_name(torch_device('cuda', 0))}.json")
    worst = max(rows, key=lambda row: row["vs_copy"])
    return {
        "says": f"{len(rows)} kernels agree; the slowest takes {worst['vs_copy']} times a copy "
        f"({worst['kernel']} {worst['variant']})"
    }


def conformance(folder: Path, device: str) -> dict[str, Any]:
    """Check the contract of an engine (tests/rollout/conformance) on GPU 0 or on the CPU."""
    output = folder / "conformance_gpu.json"
    # SGLang's own choice on a Hopper GPU is FA3, whose kernels are not among the pieces.
    command = ["-m", "benchmarks.conformance", "--gpus", "0", "--output", str(output)]
    try:
        run_child([*command, "--server-args", json.dumps(gpu_args())])
    finally:
        runs = json.loads(output.read_text())["runs"] if output.is_file() else []
        note(conformance=runs)
    shutil.copyfile(output, ROOT / "benchmarks" / "results" / output.name)
    return {"says": ", ".join(f"{run['num_engines']} x {run['passed']} passed" for run in runs)}
