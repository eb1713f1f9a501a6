"""This module measures what shared prefixes save: `python -m benchmarks.shared_prefixes`.

One process with one thread holds one policy, a MoE of 4 layers in float32, and takes steps of the same
samples by turns with `train.share_prefixes` off and auto, so that what else the machine does meets
both. The learning rate is so small that no step changes the weights.
A step is what the trainer does with a rollout: packing, the log-probs before the update, and forward,
backward with recompute and an optimizer step, with captured routes replayed (R3). Figures are medians
of wall-clock and CPU seconds and of peak memory: on a CPU the resident memory above that before the
step, on a GPU what torch allocated.

`named` is the case of the goal: at least GOAL times the speed. In `different` the samples of a prompt
have different routes from the first token on, so nothing can be shared although the plan expects it;
in `single` each prompt has one sample, so the plan expects nothing. There sharing may take at most
LIMIT of the time without it. That is judged by the median over pairs of neighbouring steps, because
the speed of a shared machine varies by more than this limit from one minute to the next.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.evidence.result import finish, summary, write_result
from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.config import AlgorithmConfig, ModelConfig, OptimizerConfig
from mrl.learn.batching import make_train_batch
from mrl.shared_prefixes import expected_gain
from mrl.toy_model import write_toy_model
from mrl.types import LossOutput, MicroBatch, RoutingTrace, Sample, TrainBatch, VersionSpan
from parallel import prepare
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.mesh import Mesh, destroy_mesh, init_mesh
from parallel.packing import num_rows
from parallel.policy import Policy, with_old_logprobs
from parallel.reduce import reduce_statistics

GOAL = 2.5
LIMIT = 1.03
LOGPROB_TOLERANCE, GRAD_NORM_TOLERANCE = 1e-4, 1e-5
"""Absolute and relative: a sum over thousands of tokens in float32 has no smaller noise."""
LAYERS, VOCAB, EXPERTS, TOPK = 4, 128, 16, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "num_layers": LAYERS, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": EXPERTS, "num_experts_per_tok": TOPK,
    "moe_intermediate_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip
BUDGET = 4608
"""Rows of a micro-batch: two samples of the named case, or its whole group with a shared prompt."""


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    prompt_len: int
    response_len: int
    num_samples: int
    prompts: int = 1
    same_routes: bool = True


CASES = (
    Case("named", 2048, 256, 8),
    Case("long answers", 512, 1024, 4),
    Case("even", 512, 512, 4, prompts=2),
    Case("short prompts", 128, 512, 8),
    Case("pairs", 1024, 512, 2, prompts=2),
    Case("single", 768, 256, 1, prompts=8),
    Case("different", 768, 256, 8, same_routes=False),
)
UNSHARED = ("single", "different")
ARMS = {"off": False, "auto": True}


def make_samples(
    case: Case, sizes: dict[str, Any] = SIZES, *, with_routes: bool = True
) -> list[Sample]:
    """Make random tokens and routes for a model of these sizes; the samples of a prompt have those of
    its tokens in common."""
    generator = torch.Generator().manual_seed(0)
    length, samples = case.prompt_len + case.response_len, []
    layers, experts, vocab = sizes["num_layers"], sizes["num_experts"], sizes["vocab_size"]
    numbers = tuple(range(1, layers + 1))
    for group_id in range(case.prompts):
        tokens = torch.randint(0, vocab, (length,), generator=generator)
        scores = torch.rand(length - 1, layers, experts, generator=generator)
        for _ in range(case.num_samples):
            own, rows = tokens.clone(), scores.clone()
            kept = case.prompt_len if case.same_routes else 0
            own[case.prompt_len :] = torch.randint(
                0, vocab, (case.response_len,), generator=generator
            )
            rows[kept:] = torch.rand(length - 1 - kept, layers, experts, generator=generator)
            ids = rows.topk(sizes["num_experts_per_tok"]).indices.to(torch.uint8)
            samples.append(
                Sample(
                    group_id=group_id,
                    token_ids=own,
                    prompt_len=case.prompt_len,
                    loss_mask=torch.arange(length) >= case.prompt_len,
                    rollout_logprobs=-torch.rand(length, generator=generator),
                    weight_versions=(VersionSpan(0, case.prompt_len, length),),
                    finish_reason="stop",
                    routing=RoutingTrace(ids, numbers, experts, (VersionSpan(0, 0, length - 1),), 0)
                    if with_routes
                    else None,
                )
            )
    return samples


class Steps:
    """Takes steps of one policy, with and without sharing."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        replay: Replay = Replay.rollout,
    ) -> None:
        """`folder` has the model, in which each layer is MoE, or none with `Replay.off`."""
        self.mesh, self._replay = mesh, replay
        config = ModelConfig(path=str(folder), transformer_impl="local", dtype=dtype)
        self.policy = Policy(
            HfModel.read(folder), mesh, config, OptimizerConfig(lr=1e-30), recompute=True,
            temperature=1.0,
        )  # fmt: skip

    def step(self, samples: list[Sample], share: bool) -> dict[str, Any]:
        """Take a step, and return what it computed."""
        signs = [(-1.0) ** i for i in range(len(samples))]
        batch = make_train_batch(samples, signs, gspo, self.mesh, BUDGET, share_prefixes=share)
        before = self.policy.forward_only(batch.micro_batches, self._replay)
        micro = with_old_logprobs(batch.micro_batches, before)
        ready = TrainBatch(micro, batch.num_loss_tokens, batch.num_samples)
        done = self.policy.train_step(ready, loss, self._replay)
        return {
            "rows": sum(map(num_rows, micro)),
            "micro_batches": len(micro),
            "logprobs": logprobs_of(micro, before.logprobs),
            "grad_norm": done.grad_norm,
            "loss": reduce_statistics(done.stats)[Policy.loss_key],
        }


def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
    return gspo.loss(logprobs, batch, AlgorithmConfig())


def logprobs_of(batches: list[MicroBatch], found: list[torch.Tensor]) -> torch.Tensor:
    """Join the log-probs of all samples, in their order."""
    parts: dict[int, torch.Tensor] = {}
    for batch, values in zip(batches, found, strict=True):
        assert batch.sample_ids is not None
        cut = values.cpu().split(batch.cu_seqlens.diff().tolist())
        parts |= dict(zip(batch.sample_ids.tolist(), cut, strict=True))
    return torch.cat([parts[i] for i in sorted(parts) if i >= 0])


def measured(run: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, float]]:
    """Return the result of `run`, its wall-clock and CPU seconds, and its peak memory in MB."""
    reset_peak(device)
    base = memory_mb(device, peak=False)
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    peak = memory_mb(device, peak=True) - base
    return result, {"wall_s": seconds[0], "cpu_s": seconds[1], "peak_mb": peak}


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def memory_mb(device: torch.device, *, peak: bool) -> float:
    if device.type == "cuda":
        found = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        return found / 1e6
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


def compare(steps: Steps, case: Case, pairs: int, sizes: dict[str, Any] = SIZES) -> dict[str, Any]:
    """Take steps by turns; the first of each is not counted."""
    samples = make_samples(case, sizes)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    results: dict[bool, dict[str, Any]] = {}
    for number in range(pairs + 1):
        for share in (False, True) if number % 2 else (True, False):
            result, figures = measured(
                lambda share=share: steps.step(samples, share), steps.mesh.device
            )
            results[share] = result
            if number:
                found[share].append(figures)
    medians = {
        share: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for share, rows in found.items()
    }
    off, auto = medians[False], medians[True]
    gap = (results[True]["logprobs"] - results[False]["logprobs"]).abs().max()
    norms = results[True]["grad_norm"] / results[False]["grad_norm"]
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        **dataclasses.asdict(case),
        "tokens": tokens,
        "rows": results[True]["rows"],
        "micro_batches": {name: results[on]["micro_batches"] for name, on in ARMS.items()},
        "expected_gain": round(
            expected_gain(case.prompt_len, case.response_len, case.num_samples), 3
        ),
        "fewer_rows": round(tokens / results[True]["rows"], 3),
        "speed": {key: round(off[key] / auto[key], 3) for key in ("wall_s", "cpu_s")},
        "quartiles_of_pairs": [
            round(q, 3)
            for q in statistics.quantiles(
                [a["cpu_s"] / b["cpu_s"] for a, b in zip(found[False], found[True], strict=True)],
                n=4,
            )
        ],
        "off": {key: round(value, 3) for key, value in off.items()},
        "auto": {key: round(value, 3) for key, value in auto.items()},
        "largest_logprob_difference": float(gap),
        "relative_grad_norm_difference": abs(norms - 1),
        "loss_difference": abs(results[True]["loss"] - results[False]["loss"]),
    }  # fmt: skip


def failures(row: dict[str, Any]) -> list[str]:
    """Return what does not hold of a case, one sentence each."""
    name, speed = row["name"], row["speed"]["cpu_s"]
    bad = []
    if name == "named" and speed < GOAL:
        bad.append(f"{name}: {speed} times the speed, below {GOAL}")
    paired = row["quartiles_of_pairs"][1]
    if name in UNSHARED and 1 / paired > LIMIT:
        bad.append(f"{name}: {1 / paired:.3f} of the time without sharing, above {LIMIT}")
    if (gap := row["largest_logprob_difference"]) > LOGPROB_TOLERANCE:
        bad.append(f"{name}: log-probs differ by {gap:.1e}")
    if (gap := row["relative_grad_norm_difference"]) > GRAD_NORM_TOLERANCE:
        bad.append(f"{name}: gradient norms differ by {gap:.1e}")
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--pairs", type=int, default=9, help="timed turns of each case")
    parser.add_argument("--only", default="", help="one case; writes nothing")
    parser.add_argument("--output", type=Path, help="another file than the one in results/")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in ("", case.name)]
    if not cases or args.pairs < 2:
        names = ", ".join(case.name for case in CASES)
        parser.error(f"expected --pairs of at least 2, and --only one of {names}")
    torch.set_num_threads(1)
    prepare()
    dims = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        mesh = init_mesh(dims, seed=0)
        try:
            write_toy_model(Path(scratch) / "model", **SIZES)
            steps = Steps(Path(scratch) / "model", mesh)
            for case in cases:
                rows.append(compare(steps, case, args.pairs))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            destroy_mesh()
    bad = [failures(row) for row in rows]
    for line in [line for each in bad for line in each]:
        print(f"FAILED {line}")
    failed = sum(bool(each) for each in bad)
    if not args.only:
        content = {"goal": GOAL, "limit": LIMIT, "budget": BUDGET, "model": SIZES, "cases": rows}
        write_result(
            "shared_prefixes", content, passed=len(rows) - failed, failed=failed,
            packages=("torch", "megatron-core"), device=mesh.device, path=args.output,
        )  # fmt: skip
    finish(len(rows) - failed, failed)


if __name__ == "__main__":
    main()
