"""Decide which ranks of a job train, and which ranks (rollout ranks) only run engines."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config import Recipe, RolloutConfig
from mrl.config.asynchronous import AsyncConfig
from mrl.errors import InputError
from mrl.preflight.engine_layout import RANKS, EngineLayout, engine_layout
from parallel.dims import ParallelDims

PLACEMENT = "rollout.placement"


@dataclass(frozen=True)
class Roles:
    """The roles of a job's ranks. The first ranks train, and the last ones may be rollout ranks."""

    num_trainers: int
    num_rollout: int
    """Number of rollout ranks; 0 in a colocated run, in which every rank trains and generates."""

    @property
    def world(self) -> int:
        """Number of ranks that the launcher starts."""
        return self.num_trainers + self.num_rollout

    @property
    def num_engine_ranks(self) -> int:
        """Number of ranks on which engines run."""
        return self.num_rollout or self.num_trainers

    def num_engines(self, rollout: RolloutConfig) -> int:
        """Return the number of engines, which is at least one."""
        return max(1, self.num_engine_ranks // rollout.tensor_parallel_size)

    def engine_layout(self, rollout: RolloutConfig) -> EngineLayout:
        """Return the layout of the engines. Raises InputError if the ranks do not split into engines.

        In a disaggregated run, each engine must be on one node. This is not checked here, because
        trainers do not know how many ranks other nodes have. The rollout ranks check it when they
        start (`check_engine_on_node`).
        """
        return engine_layout(rollout, self.num_engine_ranks, self.num_rollout or None)

    def is_rollout(self, rank: int) -> bool:
        """Return whether a rank is a rollout rank."""
        return rank >= self.num_trainers

    def describe(self) -> str:
        if not self.num_rollout:
            return f"colocated: {self.world} rank(s) take turns at training and generating"
        return (
            f"disaggregated: {_ranks(0, self.num_trainers)} for training, "
            f"{_ranks(self.num_trainers, self.world)} for rollout"
        )


def roles_of(recipe: Recipe, world: int) -> Roles:
    """Return the roles of `world` ranks. Raises InputError if the recipe cannot run on them."""
    if recipe.debug.load_rollouts is not None and recipe.rollout.placement == "disaggregated":
        raise InputError(
            f"{PLACEMENT} is disaggregated, but debug.load_rollouts starts no engine; set "
            f"{PLACEMENT}=colocated"
        )
    return roles_of_engines(recipe.rollout, world)


def roles_of_engines(rollout: RolloutConfig, world: int) -> Roles:
    """Return the roles of `world` ranks. The roles depend only on the recipe's `rollout` section.

    Raises InputError if `world` ranks are too few, or if the keys of `rollout` contradict each
    other.
    """
    if rollout.placement == "colocated":
        if rollout.num_ranks is not None:
            raise InputError(
                f"rollout.num_ranks is {rollout.num_ranks}, but {PLACEMENT} is colocated, so every "
                f"rank trains; set {PLACEMENT}=disaggregated, or leave num_ranks out"
            )
        return Roles(world, 0)
    if rollout.num_ranks is None:
        raise InputError(
            f"{PLACEMENT} is disaggregated, and rollout.num_ranks is missing; set how many of the "
            "ranks lead engines"
        )
    if rollout.num_ranks % rollout.tensor_parallel_size:
        raise InputError(
            f"rollout.num_ranks {rollout.num_ranks} is not divisible by "
            f"rollout.tensor_parallel_size {rollout.tensor_parallel_size}"
        )
    if world <= rollout.num_ranks:
        raise InputError(
            f"{PLACEMENT} is disaggregated: {world} rank(s) were started, and rollout.num_ranks takes "
            f"{rollout.num_ranks} of them; start at least {rollout.num_ranks + 1}, so that one trains"
        )
    return Roles(world - rollout.num_ranks, rollout.num_ranks)


def trainer_dims(recipe: Recipe, roles: Roles) -> ParallelDims:
    """Return the parallel layout of the ranks that train.

    Raises InputError if the parallel sizes in the recipe do not fit the number of these ranks.
    """
    try:
        return ParallelDims.create(
            recipe.parallel, roles.num_trainers, fp8=bool(recipe.megatron.get("fp8"))
        )
    except InputError as error:
        if not roles.num_rollout:
            raise
        raise InputError(
            f"{error}; these are the ranks that train: {roles.num_rollout} of the {roles.world} ranks "
            "lead engines (rollout.num_ranks)"
        ) from None


def check_engine_on_node(roles: Roles, rollout: RolloutConfig, rank: int, last: int) -> None:
    """Raise InputError if the engine that rollout rank `rank` leads would not fit on one node.

    `last` is the last rank on the same node as `rank`. Nothing is checked if `rank` does not lead
    an engine.
    """
    ranks = rollout.tensor_parallel_size
    is_leader = (rank - roles.num_trainers) % ranks == 0
    if is_leader and rank + ranks - 1 > last:
        raise InputError(
            f"{RANKS}: an engine spans the {_ranks(rank, rank + ranks)}, and the node of rank {rank} "
            f"ends with rank {last}; an engine of a disaggregated run must be on one node: change the "
            "number of ranks on its node, or make it smaller"
        )


def as_colocated(recipe: Recipe) -> Recipe:
    """Return the recipe with colocated placement, for commands that start no rollout ranks.

    Keys that only apply to a disaggregated run are set to their defaults: all keys of `async`, and
    the keys `num_ranks`, `weight_encoding` and `full_sync_every` of `rollout`.
    """
    names = ("placement", "num_ranks", "weight_encoding", "full_sync_every")
    fields = type(recipe.rollout).model_fields
    rollout = recipe.rollout.model_copy(update={name: fields[name].default for name in names})
    return recipe.model_copy(update={"rollout": rollout, "asynchronous": AsyncConfig()})


def _ranks(start: int, end: int) -> str:
    return f"rank {start}" if end - start == 1 else f"ranks {start} to {end - 1}"
