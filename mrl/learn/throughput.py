"""This module measures how fast a step was: tokens per second, and the trainer's MFU on known GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mrl.config.adapter import Adapter
from mrl.types import SampleGroup
from parallel.hf_config import HfModel
from parallel.scaling.adapter import adapted_shape
from parallel.scaling.peak_flops import peak_flops, training_flops
from parallel.scaling.shape import ModelShape

PARTS = {"rollout": "tokens/rollout", "train": "tokens/train", "step": "tokens/train"}
"""The part of a step, and the tokens that its rate counts."""


@dataclass(frozen=True)
class Throughput:
    """Knows the machine that a run is on, and turns a step's times into rates."""

    num_gpus: int
    """0 on CPUs."""
    peak_flops: float | None = None
    """bfloat16 FLOPs per second of one GPU; None where they are not known."""
    shapes: tuple[ModelShape, ...] = ()
    """The models that a step trains: the policy, and the critic where there is one."""

    @classmethod
    def of_device(
        cls,
        device: torch.device,
        world: int,
        models: Sequence[HfModel],
        adapter: Adapter | None = None,
    ) -> Throughput:
        """Look up the device of this rank, of `world` like it. `adapter`: what is trained of the first
        of the models."""
        if device.type != "cuda":
            return cls(0)
        peak = peak_flops(torch.cuda.get_device_name(device))
        if not peak:
            return cls(world)
        adapters = [adapter, *[None] * len(models)]
        shapes = tuple(map(adapted_shape, models, adapters))
        return cls(world, peak, shapes)

    def metrics(self, row: Mapping[str, float], groups: Sequence[SampleGroup]) -> dict[str, float]:
        """Return `throughput/*` of a step with the metrics `row`, its times among them.

        A part that the step did not have, such as the rollout of a run from saved rollouts, has none.
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
