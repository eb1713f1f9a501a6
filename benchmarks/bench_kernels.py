"""This module times fused kernels beside the alternatives, in one run:
`python -m benchmarks.bench_kernels`.

Every case first holds the kernel against its fp64 oracle, and eager too, so that both do the same
work; a case that disagrees has failed. Then each round times the kernel, eager PyTorch,
torch.compile of it, Liger-Kernel, TRL, and a plain copy of the bytes that any kernel must move:
forward and backward where there is a gradient, medians over the rounds. Compiling is not timed.

Writes runs/results/kernels_cpu.json (kernels_cuda_GPU.json on a GPU). Each of its `cases` has, by
candidate, the median in ms, the peak bytes (most new bytes held at a time) and the largest errors.
`vs_eager`, `vs_compile`, `vs_liger`, `vs_trl`: candidate / kernel, above 1 where the kernel is faster.
`vs_copy`: kernel / copy, the cost over the floor. null: not measured, for a reason that is printed.
"""

from __future__ import annotations

import os
from pathlib import Path

# Before torch: its compiler's files stay with the project, its profiler does not print.
_BUILD = Path(__file__).resolve().parents[1] / "build" / "inductor"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_BUILD))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import argparse  # noqa: E402
import gc  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from benchmarks.evidence.machine import describe  # noqa: E402
from benchmarks.evidence.result import (  # noqa: E402
    NEW,
    between_markers,
    finish,
    summary,
    write_result,
)
from benchmarks.kernel_bench import (  # noqa: E402
    block_quant,
    fused_experts,
    head,
    moe_permute,
    norm_rope,
    paged_attention,
    policy_loss,
    seeded_sample,
    sequences,
    training_step,
    vp_logprob,
)
from benchmarks.kernel_bench.case import RIVALS, Case, Run, Work, errors  # noqa: E402
from benchmarks.kernel_bench.timing import interleave, make_copy, peak_bytes  # noqa: E402

PACKAGES = ("torch", "triton", "liger-kernel", "trl", "transformers")
MODULES = (
    policy_loss,
    vp_logprob,
    head,
    sequences,
    moe_permute,
    paged_attention,
    fused_experts,
    norm_rope,
    seeded_sample,
    block_quant,
    training_step,
)
RATIOS = ("vs_eager", "vs_compile", "vs_liger", "vs_trl", "vs_copy")
DOCUMENT = Path(__file__).resolve().parents[1] / "docs/kernels.md"
# fp32 sums of a whole batch at a time, where the kernel's stay within blocks.
EAGER_SLACK = 100.0


class Bench:
    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.cases: list[dict[str, Any]] = []
        self.reasons: dict[str, None] = {}  # in the order of appearance
        self.num_failed = 0

    def run(self, case: Case) -> None:
        torch.set_num_threads(case.threads)
        if not self.quick:
            torch.compiler.reset()  # compiled code has its number of threads inside
        work = case.build(case, self.device, not self.quick)
        runs = {name: run for name, run in work.candidates().items() if not isinstance(run, str)}
        for reason in work.candidates().values():
            if isinstance(reason, str):
                self._explain(reason)
        found = self._check(case, work, runs)
        peaks = {}
        for name, run in runs.items():
            work.prepare()
            peaks[name] = peak_bytes(run, self.device)
        copy = make_copy(work.floor_bytes, self.device)
        seconds = interleave({**runs, "copy": copy}, work.prepare, case.num_rounds, self.device)
        self._record(case, seconds, peaks, found)

    def _explain(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons[reason] = None
            print(f"  null: {reason}")

    def _check(self, case: Case, work: Work, runs: dict[str, Run]) -> dict[str, dict[str, float]]:
        """Return the errors of every candidate.

        This also compiles what compiles at its first call; a rival that fails in it is dropped from
        `runs`, with its reason."""
        expected = work.expected()
        expected = {name: value.cpu() for name, value in expected.items()}
        found: dict[str, dict[str, float]] = {}
        for name in list(runs):
            work.prepare()
            try:
                outputs = {key: value.detach().cpu() for key, value in runs[name]().items()}
            except Exception as error:
                if name not in ("compile", "liger", "trl"):
                    raise
                lines = str(error).splitlines() or [""]
                self._explain(f"{case.name}: {name} failed, {type(error).__name__}: {lines[0]}")
                del runs[name]
                continue
            found[name] = errors(work, outputs, expected)
        wrong = []
        for name, slack in (("kernel", 1.0), ("eager", EAGER_SLACK)):
            for output, error in found[name].items():
                limit = work.tolerance[output]
                if not error <= limit * slack:  # NaN is wrong too
                    wrong.append(
                        f"{name} {output} is off by {error:.1e}, limit {limit * slack:.1e}"
                    )
        if wrong:
            self.num_failed += 1
            print(f"  FAILED {case.name}: " + "; ".join(wrong))
        return found

    def _record(
        self,
        case: Case,
        seconds: dict[str, float],
        peaks: dict[str, int],
        found: dict[str, dict[str, float]],
    ) -> None:
        kernel = seconds["kernel"]
        ratios = {f"vs_{rival}": None for rival in RIVALS} | {
            f"vs_{rival}": round(seconds[rival] / kernel, 2) for rival in RIVALS if rival in seconds
        }
        row = {
            "kernel": case.kernel,
            "variant": case.variant,
            "shape": list(case.shape),
            "dtype": case.dtype,
            "threads": case.threads,
            **ratios,
            "vs_copy": round(kernel / seconds["copy"], 2),
            "num_rounds": case.num_rounds,
            "median_ms": {name: round(value * 1e3, 4) for name, value in seconds.items()},
            "peak_bytes": peaks,
            "largest_errors": found,
        }
        self.cases.append(row)
        figures = ", ".join(f"{name} {row[name]}" for name in RATIOS if row[name] is not None)
        print(
            f"{case.name}: {kernel * 1e3:.3f} ms, {figures}, "
            f"peak {peaks['kernel'] / 2**20:.2f} MiB (eager {peaks['eager'] / 2**20:.2f})",
            flush=True,
        )


def choose_cases(only: str, quick: bool, device: torch.device) -> list[Case]:
    cuda = device.type == "cuda"
    cases = [case for module in MODULES for case in module.cases(quick, cuda)]
    return [case for case in cases if only in case.name]


def result_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "kernels_cpu"
    name = torch.cuda.get_device_name(device).lower()
    return f"kernels_cuda_{''.join(c if c.isalnum() else '_' for c in name)}"


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of the page: kernel, shape, time, ratios and peak memory of each case."""
    rows = [
        "| op, variant | shape | dtype | threads | ms | "
        + " | ".join(RATIOS)
        + " | peak MiB | eager's |",
        "|" + "---|" * (7 + len(RATIOS)),
    ]
    for case in cases:
        ratios = ["" if case[name] is None else f"{case[name]:.3g}" for name in RATIOS]
        peaks = [f"{case['peak_bytes'][name] / 2**20:.3g}" for name in ("kernel", "eager")]
        cells = (
            f"`{case['kernel']}` {case['variant']}",
            " x ".join(str(size) for size in case["shape"]),
            case["dtype"],
            str(case["threads"]),
            f"{case['median_ms']['kernel']:.3g}",
            *ratios,
            *peaks,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def pages(name: str, result: Mapping[str, Any]) -> dict[Path, str]:
    """Return the page with the table of a whole run."""
    return {DOCUMENT: between_markers(DOCUMENT.read_text(), "speed", table(result["cases"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, no torch.compile")
    parser.add_argument("--only", default="", help="cases whose printed name contains this")
    parser.add_argument("--output", type=Path, help="result file; else a whole run has its own")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, expected cpu: torch sees no GPU here")
    device = torch.device(arguments.device)
    cases = choose_cases(arguments.only, arguments.quick, device)
    if not cases:
        parser.error(f"--only: got {arguments.only!r}, expected a part of some case's name")
    measured = "medians of interleaved rounds; forward and backward where there is a gradient"
    words = {**describe(device, PACKAGES), "measured": measured}
    print("\n".join(f"{name}: {value}" for name, value in words.items()))
    bench = Bench(device, arguments.quick)
    for case in cases:
        bench.run(case)
        gc.collect()  # one case's tensors at a time: logits are large
    if arguments.output or not (arguments.only or arguments.quick):
        content = {"measured": measured, "not_measured": list(bench.reasons), "cases": bench.cases}
        write_result(
            "kernels_cpu",
            content,
            passed=len(cases) - bench.num_failed,
            failed=bench.num_failed,
            packages=PACKAGES,
            device=device,
            path=arguments.output or NEW / f"{result_name(device)}.json",
        )
    finish(len(cases) - bench.num_failed, bench.num_failed)


if __name__ == "__main__":
    main()
