"""This module lists the parts of `make gpu-check` in the order in which they are run, the most
telling first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part finds out one thing, in a process of its own: `benchmarks.gpu_lane.parts NAME`."""

    name: str
    module: str
    """The module of benchmarks/gpu_lane whose `name(folder, device)` returns the figures."""
    tells: str
    limit_s: float
    """Seconds on a GPU machine after which the part is killed."""
    cpu_limit_s: float | None = None
    """The same with `--device cpu`; None where the part says nothing without a GPU."""


PARTS = (
    Part("build", "facts", "the extension is there; versions and the device; writes the model",
         150, 120),
    Part("engine", "engine_parts", "an engine starts, sleeps at once, wakes, takes weights, generates",
         300, 400),
    Part("trainer_step", "trainer_parts",
         "one forward, backward and optimizer step of a 1 GB MoE in bf16, layers without "
         "TransformerEngine; whether two passes agree", 180, 240),
    Part("sync", "engine_parts", "bytes per second of a weight update, beside a copy", 120, 480),
    Part("train", "engine_parts", "`mrl train`, three steps of that MoE", 240, 500),
    Part("kernels", "suites", "the kernel benchmark", 150, 300),
    Part("native", "native_parts", "mrl's own layers beside what they replace: time and memory",
         90, 240),
    Part("quantized", "quantized_parts",
         "an engine with fp8 weights: bytes, digests, canaries, a planted stale scale", 200, 400),
    Part("byte_kernels", "bytes_parts",
         "block_quant and weight_delta beside their oracles, torch and a copy", 60, 120),
    Part("deltas", "bytes_parts", "bytes and seconds of deltas beside whole versions", 90, 240),
    Part("prefixes", "prefix_parts", "shared prefixes: loss, time and memory of steps", 90, 300),
    Part("gpu_tests", "suites", "the tests marked `gpu`", 120),
    Part("memory_plan", "facts", "the memory of `train` beside what the plan says", 30),
    Part("conformance", "suites", "what an engine owes, on GPU 0", 200),
    Part("engine_settings", "engine_parts",
         "an engine starts where the allocator has expandable segments", 90, 200),
    Part("sleep_wake", "engine_parts",
         "memory over 50 cycles of sleep levels 2 and 1: the leak", 200, 840),
    Part("routes", "engine_parts", "tokens per second with and without captured routes", 150, 660),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}
NO_FIGURES = "the part `train` has left no figures: it has to pass first"
"""Why `memory_plan` has nothing to compare with."""
