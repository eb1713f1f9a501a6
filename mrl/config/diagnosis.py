"""What a run keeps and measures to explain itself afterwards."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class DiagnosisConfig(Branch):
    save_tokens_every: int = Field(default=1, ge=0)
    """Steps between token records (tokens/step_*.safetensors): log-probs of both sides, advantages,
    weight versions and routes of every token before the update; 0 writes none."""
    max_tokens: int = Field(default=65536, ge=1)
    """Tokens of one record. Of a larger step, half of them go to the samples with the largest
    |old - rollout log-prob|, and half to samples spread evenly over the step."""
    decompose_every: int = Field(default=10, ge=0)
    """Steps between decompositions of the gap between trainer and engine, by what is replayed and by
    layer, on one micro-batch of each data-parallel rank (diagnosis/step_*.json); 0 makes none."""
    decompose_layers: int = Field(default=8, ge=1)
    """MoE layers that a decomposition takes the routes away from, two forward passes each; of more
    layers, so many that lie evenly."""
    capture_routes: bool = False
    """Ask the engine for its routes also where they are not replayed (`moe.routing_replay` off or r2),
    to compare them with the trainer's; under r3 they are there anyway."""
