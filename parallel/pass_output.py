"""The results of a pass over micro-batches, and the observer that gets the results of a training
pass.

Dimensions: m entries of the `RouterRows` of this rank (one for each of its rows if nothing is
shared), N packed tokens of a micro-batch, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from moe.routes import Route, RouterScores
from mrl.types import LossOutput, Statistics

Observe = Literal["counts", "rows"]
"""`counts`: compare the captured routes with the routers' own choices, even in a pass that does not
replay them, and record statistics. `rows`: also record the experts of every row, in
`PassOutput.observed`."""


@dataclass(frozen=True)
class ObservedRoutes:
    """The captured and native routes of one layer and micro-batch.

    The m entries are in the order of `PipelineRunner.row_places`.
    """

    captured: Tensor
    """i16[m, K]: the engine's choice; NATIVE_ROUTE in rows without a captured route."""
    native: Tensor
    """i16[m, K]: the router's own choice."""
    margins: Tensor
    """f32[m]: the router's margin in each row (see `moe.replay.margins`)."""


@dataclass
class PassOutput:
    """The results of one pass over this rank's micro-batches, in their order."""

    logprobs: list[Tensor] = field(default_factory=list)
    """A policy's log-probs: f32[N] for each micro-batch, 0 at tokens without loss; only on the last
    pipeline stage."""
    entropies: list[Tensor] = field(default_factory=list)
    """A policy's entropies: f32[N] for each micro-batch, 0 at tokens without loss; only on the last
    pipeline stage."""
    values: list[Tensor] = field(default_factory=list)
    """A critic's values: f32[N] for each micro-batch, 0 at tokens without loss; only on the last
    pipeline stage."""
    values_after: list[Tensor] = field(default_factory=list)
    """A critic's values of the states after the loss tokens: f32[N] for each micro-batch, 0 at
    tokens without loss; only on the last pipeline stage."""
    losses: list[LossOutput] = field(default_factory=list)
    """The detached loss of each micro-batch; only on the last pipeline stage, and only in a pass
    with a loss."""
    native_routes: list[dict[int, Route]] = field(default_factory=list)
    """The routers' own choices by micro-batch and layer number. `Replay.recorded` replays them.
    They are recorded only in a pass without gradient and without replay."""
    router_scores: list[RouterScores] = field(default_factory=list)
    """The routers' scores by micro-batch, in a pass that keeps them; on one rank's model only."""
    chosen_keys: list[dict[int, Tensor]] = field(default_factory=list)
    """The keys that the indexers of sparse attention chose or replayed, by micro-batch and layer
    number, in a pass that keeps them (see `moe.keys.KeyReplay.recorded`). `Replay.with_keys` replays
    them."""
    observed: list[dict[int, ObservedRoutes]] = field(default_factory=list)
    """Routes by micro-batch and layer number, in a pass that observes `rows`. They take 4 K + 4
    bytes for each row and layer of this rank. The dict of a micro-batch without captured routes is
    empty."""
    routing: Statistics = field(default_factory=dict)


@dataclass(frozen=True)
class Observer:
    """Observes a training pass: `observe` says what the pass records about the routers, and `record`
    is called with the output of the pass, before the weights are updated."""

    observe: Observe | None = None
    record: Callable[[PassOutput], None] = lambda output: None


UNOBSERVED = Observer()
