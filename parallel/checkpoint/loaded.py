"""The models of a checkpoint, and what is known after it was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.megatron_model import MegatronModel

Models = Mapping[str, MegatronModel]
"""Maps the prefix that a model's keys have in a checkpoint to the model. The prefix is empty for
the policy, and `critic_` for the critic."""


def by_prefix(policy: MegatronModel, critic: MegatronModel | None) -> Models:
    return {"": policy} | ({} if critic is None else {"critic_": critic})


@dataclass(frozen=True)
class Loaded:
    """The result of loading a checkpoint, apart from the models' state, which is loaded into the
    models."""

    step: int
    trainer: dict[str, Any]
    """The trainer state that was passed to `save`."""
    same_layout: bool
    """Whether the checkpoint was saved in this layout. If so, the random states were restored;
    otherwise they were reseeded. Without the optimizer they stay as they are."""
