"""This module holds the part of run.py that rolls out with quantised weights.

On a GPU these are SGLang's own fp8 layers and kernels; on a CPU the engine holds the dequantised
weights, and a plug-in quantises the inputs of its layers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_lane.engine_parts import BUCKET_BYTES, Bench
from benchmarks.gpu_lane.native_parts import one_process
from benchmarks.gpu_lane.parts import note
from mrl.engine_pool.metrics import EngineMetrics
from mrl.engine_pool.remote.rendezvous import open_store
from mrl.engines.sglang.digests import ACTION, quantized_modules
from mrl.quantization import DTYPES, SCHEMES, fake_quantize
from mrl.system.shared_memory import SharedMemory
from mrl.types import Prompt, WeightBucket
from mrl.weight_sync.load import Canaries, CanaryMaker, WeightLoader
from mrl.weight_sync.quantize import quantized_buckets
from mrl.weight_sync.rank_pair import PairReceiver, PairSender
from mrl.weight_sync.staging import Staging

SCHEME = SCHEMES["fp8_block"]
NUM_SYNCS = 3
TIMEOUT_S = 60.0
LARGEST_SHARE = 0.52
"""Bytes of a quantised matrix with its scales, relative to bfloat16."""


class Trainer:
    """The trainer's policy on this device, and the way of its weights to an engine."""

    def __init__(self, bench: Bench) -> None:
        mesh = one_process()
        from parallel.hf_config import HfModel
        from parallel.implementation import choose_dtype
        from parallel.policy import Policy

        rollout, model = bench.config.rollout, bench.config.model
        model = model.model_copy(update={"transformer_impl": "local"})
        self.policy = Policy(
            HfModel.read(bench.model), mesh, model, None, recompute=False, temperature=1.0
        )
        self.dtype = choose_dtype(rollout.engine_dtype(model))
        self.metrics = EngineMetrics()
        self.loader = WeightLoader(rollout, model, self.metrics)
        self.bench, self.memory = bench, SharedMemory()
        self.matrix_bytes = {"quantised": 0, "bfloat16": 0}

    def buckets(self, version: int) -> Iterator[WeightBucket]:
        """Yield the buckets of a version, quantised, and count the bytes of quantised matrices."""
        self.matrix_bytes = {"quantised": 0, "bfloat16": 0}
        whole = self.policy.export(version, BUCKET_BYTES, self.dtype)
        for bucket in quantized_buckets(whole, SCHEME.name, self.memory):
            for name, tensor in bucket.tensors:
                if name.endswith(SCHEME.suffix) or tensor.dtype in DTYPES:
                    self.matrix_bytes["quantised"] += tensor.nbytes
                if tensor.dtype in DTYPES:
                    self.matrix_bytes["bfloat16"] += 2 * tensor.numel()
            yield bucket

    def sync(self, version: int, buckets: Iterator[WeightBucket] | None = None) -> float:
        """Load a version; return the seconds. The engine's digests of bytes and scales are compared
        with the trainer's, and so are the names of the modules that it quantised."""
        start = time.perf_counter()
        self.loader.update(self.bench.engine.endpoint, buckets or self.buckets(version), version)
        return time.perf_counter() - start

    def encode_seconds(self, version: int) -> dict[str, float]:
        """Return the seconds of an export alone, and of one that is quantised."""
        found = {}
        for name, buckets in (
            ("export", self.policy.export(version, BUCKET_BYTES, self.dtype)),
            ("export and quantise", self.buckets(version)),
        ):
            start = time.perf_counter()
            for _ in buckets:
                pass
            if self.bench.device.type == "cuda":
                torch.cuda.synchronize()
            found[name] = round(time.perf_counter() - start, 4)
        return found


def quantized(folder: Path, device: str) -> dict[str, Any]:
    """Roll out with `rollout.quantization: fp8_block`: syncs, canaries, a planted stale scale, and a
    version that comes as a delta through a worker's memory."""
    bench = Bench("quantized", folder, device, routes=False, quantization="fp8_block")
    trainer = Trainer(bench)
    encode_s = [trainer.encode_seconds(0) for _ in range(2)][1]  # the first allocates buffers
    maker = CanaryMaker(bench.config.rollout, bench.config.model, prompts())
    canaries = maker.make(trainer.policy)
    note(encode_s=encode_s, noise_abs_mean=canaries.quantization_abs_mean)
    start = time.perf_counter()
    bench.engine.start()
    try:
        note(start_s=round(time.perf_counter() - start, 1))
        sync_s = [trainer.sync(version) for version in range(1, 1 + NUM_SYNCS)]
        whole = trainer.policy.export_bytes(trainer.dtype)
        sent, matrices = trainer.metrics.sync_bytes, trainer.matrix_bytes
        share = matrices["quantised"] / matrices["bfloat16"]
        answer = bench.engine.connection.post("/weights_checker", {"action": ACTION})
        num_modules = len(quantized_modules(answer))
        note(sync_s=sync_s, sync_bytes=sent, whole_bytes=whole, share_of_matrices=share,
             quantised_modules=num_modules)  # fmt: skip
        assert device == "cpu" or share <= LARGEST_SHARE, f"quantised matrices take {share:.1%}"
        trainer.loader.check_canaries(bench.engine.endpoint, canaries)
        note(canary_abs_mean=trainer.metrics.canary_abs_mean)
        gaps = compare_weights(trainer, canaries.sequences)
        rate = bench.generate(8, 16)
        refused = refuse_stale_scale(trainer, NUM_SYNCS + 1)
        trainer.sync(NUM_SYNCS + 2)
        trainer.loader.check_canaries(bench.engine.endpoint, canaries)
        staged = sync_by_delta(trainer, NUM_SYNCS + 3)
        note(staged_delta=staged)
        trainer.loader.check_canaries(bench.engine.endpoint, maker.make(trainer.policy))
    finally:
        bench.engine.stop()
    return {
        "gaps": gaps, "tokens_per_s": rate, "stale_scale": refused,
        "says": f"{num_modules} modules in fp8, {sent / whole:.0%} of the bytes in "
        f"{min(sync_s):.2f} s; log-probs apart by {gaps['weights of the trainer']:.3g}, by "
        f"{gaps['weights of the engine']:.3g} with the engine's weights; a stale scale is refused; a "
        f"staged delta of {staged['bytes'] / sent:.1%} loads",
    }  # fmt: skip


def sync_by_delta(trainer: Trainer, version: int) -> dict[str, float]:
    """Send two versions to a worker's memory, the second as a delta, and load that one from there.

    The worker of a disaggregated run has this memory in another process than the trainer; the engine
    maps it either way.
    """
    device = trainer.bench.device
    store, address = open_store("127.0.0.1")
    staging = Staging(device=device if device.type == "cuda" else None)
    receiver = PairReceiver(address, "worker", TIMEOUT_S, torch.device("cpu"))
    sender = PairSender(address, TIMEOUT_S, device, 1)
    seconds = 0.0
    for number in (version, version + 1):
        worker = threading.Thread(target=receiver.receive, args=(staging, number), daemon=True)
        worker.start()
        start = time.perf_counter()
        failed = sender.send(trainer.buckets(number), number, ["worker"], Canaries([], []))
        seconds = time.perf_counter() - start
        worker.join(TIMEOUT_S)
        assert not failed, f"version {number} did not arrive"
        if number == version:
            change_weights(trainer)
    traffic = sender.traffic
    assert traffic.num_resent == 0, f"{traffic.num_resent} buckets of the delta were sent again"
    load_s = trainer.sync(version + 1, staging.buckets())
    receiver.close()
    sender.close()
    del store
    return {"bytes": float(traffic.num_bytes), "send_s": seconds, "load_s": load_s}


@torch.no_grad()
def change_weights(trainer: Trainer) -> None:
    """Change one in a hundred elements of the trainer's weights by 1%."""
    for parameter in trainer.policy.chunks[0].parameters():
        chosen = torch.rand_like(parameter, dtype=torch.float32) < 0.01
        parameter.mul_(1 + 0.01 * chosen)


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 96, (4, 64), generator=generator)
    return [Prompt(str(i), row, "", {}, f"lane:{i}") for i, row in enumerate(ids)]


def compare_weights(trainer: Trainer, sequences: Sequence[Tensor]) -> dict[str, float]:
    """Return mean |log-prob of the engine - log-prob of the trainer|, with the trainer's own weights
    and with those of the engine."""
    got = trainer.bench.engine.endpoint.sequence_logprobs(sequences)
    own = trainer.policy.sequence_logprobs(sequences)
    with trainer.policy.fake_quantized(partial(fake_quantize, SCHEME), trainer.dtype):
        held = trainer.policy.sequence_logprobs(sequences)

    def apart(ours: Sequence[Tensor]) -> float:
        pairs = zip(got, ours, strict=True)
        return float(torch.cat([(a - b.cpu())[1:].abs() for a, b in pairs]).mean())

    return {"weights of the trainer": apart(own), "weights of the engine": apart(held)}


def refuse_stale_scale(trainer: Trainer, version: int) -> str:
    """Change one scale after its digest was computed; return the error with which the sync ends."""

    def with_stale_scale() -> Iterator[WeightBucket]:
        is_done = False
        for bucket in trainer.buckets(version):
            name = next((n for n, _ in bucket.tensors if n.endswith(SCHEME.suffix)), None)
            if name is not None and not is_done:
                dict(bucket.tensors)[name][0, 0] *= 1.25
                is_done = True
            yield bucket

    try:
        trainer.sync(version, with_stale_scale())
    except RuntimeError as error:
        return str(error)[:300]
    raise AssertionError("the engine took a scale that the trainer had not sent")
