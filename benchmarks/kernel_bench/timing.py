"""Clocks, peak memory and the copy that every kernel is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernel_bench.case import Run

NUM_WARM_UPS = 1  # the check and the peak have run every candidate twice by then


def make_copy(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """A plain copy that reads and writes `num_bytes` in all, between tensors made beforehand."""
    source = torch.ones(max(num_bytes // 8, 1), dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


class Clock:
    """A clock returns the seconds of one call. On CUDA: events around it, after the L2 cache was
    filled with zeros.

    Filling the cache takes long enough for the host to queue a short candidate's launches behind
    it, so what is timed there is the device; a candidate of many launches shows its host time too.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush: Tensor | None = None
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(max(8 * size, 1 << 29), dtype=torch.uint8, device=device)

    def time(self, function: Callable[[], object]) -> float:
        if self._flush is None:
            start = time.perf_counter()
            outputs = function()
            taken = time.perf_counter() - start
            del outputs  # freed after the clock stopped, for every candidate alike
            return taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def interleave(
    candidates: dict[str, Callable[[], object]],
    prepare: Callable[[], None],
    num_rounds: int,
    device: torch.device,
) -> dict[str, float]:
    """Return the median seconds of each candidate. Each round times all, so a slow moment hits all."""
    clock = Clock(device)
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(-NUM_WARM_UPS, num_rounds):
        for name, candidate in candidates.items():
            prepare()
            seconds = clock.time(candidate)
            if round_ >= 0:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def peak_bytes(run: Run, device: torch.device) -> int:
    """Most bytes that one call holds at a time beyond what was there before it, outputs included.

    On CUDA the caching allocator's own count. On CPU the sum over the allocator's events that
    torch.profiler records (profile_memory): it sees what C++ allocates inside an op through
    torch's allocator, and does not see plain malloc.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        outputs = run()
    del outputs
    results = profile.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    events = [event for event in results.events() if event.name() == "[memory]"]  # pyright: ignore[reportOptionalMemberAccess]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, held)
    return peak
