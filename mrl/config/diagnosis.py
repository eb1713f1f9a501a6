"""Configures what a run records and measures so that it can be explained afterwards."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class DiagnosisConfig(Branch):
    save_tokens_every: int = Field(default=1, ge=0)
    """Steps between token records (tokens/step_*.safetensors): log-probs of both sides, advantages,
    weight versions and routes of every token before the update; 0 writes none."""
    max_tokens: int = Field(default=65536, ge=1)
    """Tokens of one record at most. In a larger step, half of them are of the samples with the largest
    |old - rollout log-prob|, and half of samples spread evenly over the step."""
    decompose_every: int = Field(default=10, ge=0)
    """Steps between decompositions of the gap between trainer and engine, by what is replayed and by
    layer, on one micro-batch of each data-parallel rank (diagnosis/step_*.json); 0 makes none."""
    decompose_layers: int = Field(default=8, ge=1)
    """MoE layers that are decomposed, with two forward passes each. A model with more layers has so
    many of them decomposed, spread evenly."""
    capture_routes: bool = False
    """Ask the engine for its routes even if they are not replayed (`moe.routing_replay` off or r2), to
    compare them with the trainer's; r3 always asks for them."""
