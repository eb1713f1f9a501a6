"""This module measures a step of torch's AdamW over many fp32 parameters: loop, foreach and fused.

Megatron builds this optimizer where neither TransformerEngine nor apex is installed, and mrl turns its
`fused` form on (`parallel.optimizer.use_fused_kernels`). Each form runs in a process of its own, whose
resident memory is watched during the step by a thread; on a GPU it is the allocator's peak.

    python -m studies.optimizer_step [--parameters 48] [--elements 1000000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.evidence.result import finish, write_result

FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
NUM_STEPS = 7


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@contextmanager
def peak_growth(device: str) -> Iterator[list[int]]:
    """Yield a list that gets the bytes by which memory grew at its highest, in the end."""
    found: list[int] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found.append(torch.cuda.max_memory_allocated() - before)
        return
    before, highest, done = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            highest[0] = max(highest[0], resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    done.set()
    thread.join()
    found.append(max(highest[0] - before, 0))


def measure(form: str, num_parameters: int, num_elements: int, device: str) -> dict[str, float]:
    """Return the median seconds of a step, and the bytes that it takes beside parameters and state."""
    parameters = [
        torch.nn.Parameter(torch.randn(num_elements, device=device)) for _ in range(num_parameters)
    ]
    adam = torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.01, **FORMS[form])  # pyright: ignore[reportArgumentType]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    adam.step()  # makes the moments
    seconds, growths = [], []
    for _ in range(NUM_STEPS):
        with peak_growth(device) as growth:
            start = time.perf_counter()
            adam.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        growths.append(growth[0])
    return {"seconds": statistics.median(seconds), "extra_bytes": max(growths)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=48)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--form", choices=FORMS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.form:
        print(json.dumps(measure(args.form, args.parameters, args.elements, device)))
        return
    parameter_bytes = 4 * args.parameters * args.elements
    found = {}
    for form in FORMS:
        command = [sys.executable, "-m", "studies.optimizer_step", "--form", form]
        command += ["--parameters", str(args.parameters), "--elements", str(args.elements)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found[form] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{args.parameters} x {args.elements} fp32 parameters on {device}, torch {torch.__version__}"
    )
    for form, row in found.items():
        ratio = row["seconds"] / found["foreach"]["seconds"]
        share = row["extra_bytes"] / parameter_bytes
        print(
            f"{form:8} {row['seconds'] * 1e3:8.1f} ms, {ratio:.2f} of foreach; "
            f"{share:.2f} of the parameters' bytes beside them"
        )
    passed = int(found["fused"]["extra_bytes"] < 0.1 * parameter_bytes)
    content = {"device": device, "parameter_bytes": parameter_bytes, "forms": found}
    write_result(
        "optimizer_step", content, passed=passed, failed=1 - passed, device=torch.device(device)
    )
    finish(passed, 1 - passed)


if __name__ == "__main__":
    main()
