"""This module holds the parts of run.py for fewer bytes in a weight sync: the kernels that quantise,
and deltas from a trainer to a worker.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_lane.engine_parts import BUCKET_BYTES
from benchmarks.gpu_lane.parts import model_folder, note
from benchmarks.kernel_bench import block_quant
from benchmarks.kernel_bench.case import Case
from benchmarks.kernel_bench.timing import interleave, make_copy
from mrl import kernels
from mrl.kernels import oracle, weight_delta
from mrl.kernels.digest import add_digests, digests_of
from mrl.kernels.oracle.weight_delta import weight_delta as oracle_delta
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket
from mrl.weight_sync.load import Canaries
from mrl.weight_sync.quantize import quantized_buckets
from mrl.weight_sync.rank_pair import PairReceiver, PairSender
from mrl.weight_sync.staging import Staging

WEIGHT = {"cuda": (4096, 8192), "cpu": (260, 300)}
DELTA_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 18}
SHARES = (0.003, 0.2)
"""Shares of changed elements: that of a step at a learning rate of 1e-6, and one with bitmaps."""
ROUNDS = 7
LR = 1e-6
FORMATS = ("none", "fp8_block")
NUM_VERSIONS = {"cuda": 4, "cpu": 3}
WAYS = {"full": 0, "delta": 10**6}
"""`max_deltas` of each way's sender."""
TIMEOUT_S = 60.0


def byte_kernels(folder: Path, device: str) -> dict[str, Any]:
    """Compare the bits of block_quant and weight_delta with their oracles, and time them."""
    said = [quantise_kernels(torch.device(device)), delta_kernels(torch.device(device))]
    return {"says": "; ".join(said)}


def quantise_kernels(device: torch.device) -> str:
    """Each function of block_quant beside its oracle in torch and a copy of as many bytes."""
    found: dict[str, dict[str, float]] = {}
    for variant, run in block_quant.VARIANTS.items():
        case = Case("block_quant", variant, WEIGHT[device.type], "bfloat16", block_quant.build)
        work = case.build(case, device, False)
        x = torch.randn(case.shape, device=device).bfloat16()
        ours, theirs = run(kernels, x), run(oracle, x)
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), (
                f"{variant}: {name} has other bits than the oracle"
            )
        runs: dict[str, Callable[[], object]] = {"kernel": work.kernel, "torch": work.eager}
        runs["copy"] = make_copy(work.floor_bytes, device)
        seconds = interleave(runs, work.prepare, ROUNDS, device)
        found[variant] = {f"{name}_ms": round(1e3 * s, 4) for name, s in seconds.items()}
        note(block_quant=found)
    worst = max(found.values(), key=lambda row: row["kernel_ms"] / row["copy_ms"])
    least = min(row["torch_ms"] / row["kernel_ms"] for row in found.values())
    return (
        f"block_quant has the oracle's bits, {least:.1f} times as fast as torch at least, "
        f"{worst['kernel_ms'] / worst['copy_ms']:.1f} times a copy at most"
    )


def delta_kernels(device: torch.device) -> str:
    """The comparison of two versions where the trainer's weights are, beside C++ on the host.

    The previous version is in host memory, as in `mrl.weight_sync.delta.LastVersion`.
    """
    small = torch.randint(0, 256, (2 * 70_000,), dtype=torch.uint8)
    newer = changed(small, 0.01)
    expected = oracle_delta(small.numpy().tobytes(), newer.numpy().tobytes(), 2)
    for where in ("cpu", device.type):
        payload = weight_delta.encode(small, newer.to(where), 2, 1 << 30).payload
        assert payload is not None
        assert payload.numpy().tobytes() == expected, f"{where}: other bytes than the oracle's"
    previous = torch.randint(0, 256, (2 * DELTA_ELEMENTS[device.type],), dtype=torch.uint8)
    found = {}
    for share in SHARES:
        current = changed(previous, share)
        there = current.to(device)
        ours, host = (
            weight_delta.encode(previous, each, 2, 1 << 40).payload for each in (there, current)
        )
        assert ours is not None
        assert host is not None
        assert torch.equal(ours, host), f"{share}: the bytes of {device} differ from the host's"
        base = previous.clone()
        weight_delta.apply(base, ours, 2)
        assert torch.equal(base, current), f"{share}: applied, the delta gives other bits"
        seconds = {
            "encode": timed(lambda there=there: weight_delta.encode(previous, there, 2, 1 << 40)),
            "encode on the host": timed(
                lambda current=current: weight_delta.encode(previous, current, 2, 1 << 40)
            ),
            "copy to the host": timed(lambda there=there: there.cpu()),
        }
        found[str(share)] = {"bytes": len(ours) / len(current)} | seconds
        note(weight_delta=found)
    first = found[str(SHARES[0])]
    return (
        f"a delta of {SHARES[0]:.1%} takes {first['bytes']:.2%} of the bytes, "
        f"{first['encode']:.3f} s to make, {first['encode on the host']:.3f} s on the host"
    )


def changed(flat: Tensor, share: float) -> Tensor:
    """Return u8[2 N] in which about `share` of the N elements of two bytes differ from `flat`."""
    elements = flat.clone().view(torch.int16)
    return (elements ^ (torch.rand(len(elements)) < share).short()).view(torch.uint8)


def timed(act: Callable[[], object]) -> float:
    """Return the median seconds of three calls, each of which waits for the device."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return round(statistics.median(seconds), 4)


def deltas(folder: Path, device: str) -> dict[str, Any]:
    """Send versions to a worker process whole and as deltas, in bfloat16 and in fp8 blocks.

    With two GPUs the buckets travel over NCCL, otherwise over gloo, because NCCL refuses two ranks on
    one GPU.
    """
    from mrl.engine_pool.remote.rendezvous import open_store

    there = "cuda:1" if device == "cuda" and torch.cuda.device_count() > 1 else "cpu"
    store, address = open_store("127.0.0.1")
    pipe, far = multiprocessing.Pipe()
    num = NUM_VERSIONS[device]
    worker = multiprocessing.get_context("spawn").Process(
        target=serve, args=(far, address, there, num), daemon=True
    )
    worker.start()
    rows = {}
    for scheme in FORMATS:
        senders = {
            way: PairSender(address, TIMEOUT_S, torch.device(device), most)
            for way, most in WAYS.items()
        }
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for version, weights in enumerate(versions(folder, device, num)):
            for way, sender in senders.items():
                found[way].append(send(sender, pipe, scheme, way, version, weights))
        rows[scheme] = {way: summary(each[1:]) for way, each in found.items()}  # the first is whole
        note(**rows, transport="nccl" if there != "cpu" else "gloo")
        for sender in senders.values():
            sender.close()
    worker.join(TIMEOUT_S)
    assert worker.exitcode == 0, f"the worker ended with {worker.exitcode}"
    del store
    return {"says": "; ".join(in_words(scheme, row) for scheme, row in rows.items())}


def in_words(scheme: str, row: dict[str, dict[str, float]]) -> str:
    full, delta = row["full"], row["delta"]
    return (
        f"{scheme}: {delta['bytes'] / full['bytes']:.1%} of {full['bytes'] / 1e6:.0f} MB, "
        f"{delta['seconds']:.2f} s for {full['seconds']:.2f} s"
    )


def versions(folder: Path, device: str, num: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights of versions in bfloat16; an fp32 copy moves by LR in each, as Adam moves it."""
    from safetensors.torch import load_file

    named = sorted(load_file(model_folder(folder, device) / "model.safetensors").items())
    masters = {name: weight.to(device).float() for name, weight in named}
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(num):
        yield [(name, master.bfloat16()) for name, master in masters.items()]
        for master in masters.values():
            noise = torch.randn(master.shape, device=device, generator=generator)
            master.add_(noise.sign_(), alpha=LR)


def make_buckets(
    weights: list[tuple[str, Tensor]], scheme: str, version: int, memory: SharedMemory
) -> Iterator[WeightBucket]:
    """Yield the buckets of a version with their digests, quantised if `scheme` is not `none`."""
    parts: list[list[tuple[str, Tensor]]] = [[]]
    for name, tensor in weights:
        if parts[-1] and sum(t.nbytes for _, t in parts[-1]) + tensor.nbytes > BUCKET_BYTES:
            parts.append([])
        parts[-1].append((name, tensor))
    whole = (
        WeightBucket(part, version, is_last=part is parts[-1], digest=add_digests(digests_of(part)))
        for part in parts
    )
    return quantized_buckets(whole, scheme, memory)


def send(
    sender: PairSender,
    pipe: Connection,
    scheme: str,
    way: str,
    version: int,
    weights: list[tuple[str, Tensor]],
) -> dict[str, float]:
    """Send one version; the worker's bytes must have the digests of those that were sent."""
    sent: list[tuple[str, int]] = []

    def counted() -> Iterator[WeightBucket]:
        for bucket in make_buckets(weights, scheme, version, SharedMemory()):
            sent.extend((bucket.sent_digest or bucket.digest or {}).items())
            yield bucket

    name = f"{scheme}_{way}"
    pipe.send((name, version))
    start = time.perf_counter()
    failed = sender.send(counted(), version, [name], Canaries([], []))
    seconds = time.perf_counter() - start
    held = pipe.recv()
    assert not failed, f"{name}: the worker did not get version {version}"
    assert held == add_digests(sent), f"{name}: the worker holds another version {version}"
    traffic = sender.traffic
    assert traffic.num_resent == 0, f"{name}: {traffic.num_resent} buckets had to be sent again"
    share = traffic.num_changed / max(1, traffic.num_compared)
    return {"seconds": seconds, "bytes": float(traffic.num_bytes), "changed": share}


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def serve(pipe: Connection, address: tuple[str, int], device: str, num_versions: int) -> None:
    """Receive versions, and answer each with the digests of what arrived; a process of its own."""
    receivers: dict[str, tuple[PairReceiver, Staging]] = {}
    for _ in range(num_versions * len(WAYS) * len(FORMATS)):
        name, version = pipe.recv()
        if name not in receivers:
            receiver = PairReceiver(address, name, TIMEOUT_S, torch.device(device))
            receivers[name] = receiver, Staging()
        receiver, staging = receivers[name]
        receiver.receive(staging, version)
        parts = (part for bucket in staging.buckets() for part in digests_of(bucket.tensors))
        pipe.send(add_digests(parts))
    for receiver, _ in receivers.values():
        receiver.close()
