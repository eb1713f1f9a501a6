"""Measure the speed of a step: tokens per second, and on known GPUs the MFU of the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mrl.config.adapter import Adapter
from mrl.planner.adapter import adapted_shape
from mrl.planner.peak_flops import peak_flops, training_flops
from mrl.planner.shape import ModelShape
from mrl.types import SampleGroup
from parallel.hf_config import HfModel

PARTS = {"rollout": "tokens/rollout", "train": "tokens/train", "step": "tokens/train"}
"""The parts of a step whose tokens per second are measured, each with the metric that counts its
tokens."""


@dataclass(frozen=True)
class Throughput:
    """The hardware and the models of a run, from which the rates of each step are computed."""

    num_gpus: int
    """The number of GPUs of the trainer; 0 on CPUs."""
    peak_flops: float | None = None
    """The peak bfloat16 FLOPs per second of one GPU; None if unknown."""
    shapes: tuple[ModelShape, ...] = ()
    """The shapes of the models that a step trains: the policy, and the critic if there is one."""

    @classmethod
    def of_device(
        cls,
        device: torch.device,
        world: int,
        models: Sequence[HfModel],
        adapter: Adapter | None = None,
    ) -> Throughput:
        """Make the `Throughput` of a trainer with `world` devices that are all like `device`.

        models: the models that are trained. adapter: the LoRA adapter of the first model; None if all
        weights of this model are trained.
        """
        if device.type != "cuda":
            return cls(0)
        peak = peak_flops(torch.cuda.get_device_name(device))
        if not peak:
            return cls(world)
        adapters = [adapter, *[None] * len(models)]
        shapes = tuple(map(adapted_shape, models, adapters))
        return cls(world, peak, shapes)

    def metrics(self, row: Mapping[str, float], groups: Sequence[SampleGroup]) -> dict[str, float]:
        """Return the metrics `throughput/*` of a step.

        row: the other metrics of the step. A part that did not run, such as the rollout if rollouts
        are loaded, has no rate. `throughput/mfu` is missing if `peak_flops` is None or nothing was
        trained.
        """
        found: dict[str, float] = {}
        for part, tokens in PARTS.items():
            seconds = row.get(f"time/{part}_s", 0.0)
            if seconds > 0:
                rate = row[tokens] / seconds
                found[f"throughput/{part}_tokens_per_s"] = rate
                if self.num_gpus:
                    found[f"throughput/{part}_tokens_per_gpu_s"] = rate / self.num_gpus
        seconds = row.get("time/train_s", 0.0)
        if self.peak_flops and seconds > 0:
            lengths = [len(s.token_ids) for group in groups for s in group.samples]
            flops = sum(training_flops(shape, lengths) for shape in self.shapes)
            found["throughput/mfu"] = flops / (seconds * self.num_gpus * self.peak_flops)
        return found
