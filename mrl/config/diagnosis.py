"""Configuration of what a run records and measures for later diagnosis."""

from __future__ import annotations

from pydantic import Field

from mrl.config.branch import Branch


class DiagnosisConfig(Branch):
    save_tokens_every: int = Field(default=1, ge=0)
    """Number of steps between token records (tokens/step_*.safetensors); 0 writes no records. For
    each token, a record contains the log-probs of trainer and engine before the update, the
    advantage, the weight version and the routes (the chosen experts)."""
    max_tokens: int = Field(default=65536, ge=1)
    """Maximum number of tokens in a token record. If a step has more, about half of the tokens come
    from the samples in which old and rollout log-probs differ most, and the rest from samples
    spread evenly over the step."""
    decompose_every: int = Field(default=10, ge=0)
    """Number of steps between decompositions of the difference between the log-probs of trainer and
    engine (diagnosis/step_*.json). The difference is measured by layer, and with different parts of
    the routes replayed, on one micro-batch of each data-parallel rank. 0 turns decompositions off."""
    decompose_layers: int = Field(default=8, ge=1)
    """Number of MoE layers that a decomposition measures, with two forward passes for each. In a
    model with more MoE layers, the measured layers are spread evenly over the model."""
    capture_routes: bool = False
    """Request the engine's routes (the experts that its router chose for each token) even if they
    are not replayed (`moe.routing_replay` off or r2), to compare them with the trainer's routes.
    With r3 they are always requested."""
