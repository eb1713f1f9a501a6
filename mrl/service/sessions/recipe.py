"""The recipe of a session: the keys that a client gives, completed to a full recipe with 0 training
steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from mrl.config import Recipe
from mrl.engines.sampling import check_temperature
from mrl.errors import InputError

KEYS: Mapping[str, tuple[str, ...]] = {
    "lora": (),
    "optimizer": (),
    "seed": (),
    "output_dir": (),
    "moe": ("routing_replay",),
    "train": ("micro_batch_tokens", "share_prefixes"),
    "rollout": ("temperature",),
    "checkpoint": ("keep", "save_every"),
}
"""The top-level keys that a session's recipe may have, each with the keys that are allowed in that
section. An empty tuple means that there is no restriction."""
NO_DATA = "/none"
"""The data path in a session's recipe. Every recipe needs one; no file has this path."""


def session_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's recipe, completed with the keys that every recipe must have.

    Raises InputError for keys that a session does not use.
    """
    unknown = [
        key if key not in KEYS else f"{key}.{inner}"
        for key, value in tree.items()
        for inner in (value if key in KEYS and KEYS[key] and isinstance(value, dict) else [""])
        if key not in KEYS or (inner and inner not in KEYS[key])
    ]
    if unknown:
        known = [f"{key}.{inner}" for key, below in KEYS.items() for inner in below]
        known += [key for key, below in KEYS.items() if not below]
        raise InputError(
            f"a session has no {', '.join(unknown)[:200]}: its loop is the client's; expected "
            f"{', '.join(sorted(known))}"
        )
    filled = copy.deepcopy(dict(tree))
    filled["data"] = {"path": NO_DATA}
    for key, inner, value in (("train", "num_steps", 0), ("rollout", "max_response_len", 1)):
        if isinstance(branch := filled.setdefault(key, {}), dict):
            branch[inner] = value
    if isinstance(branch := filled.setdefault("checkpoint", {}), dict):
        branch.setdefault("save_every", 0)  # a session saves when it is asked to
    return filled


def check_session(recipe: Recipe) -> None:
    """Raise InputError if the recipe has a setting that no session supports."""
    optimizer = recipe.optimizer
    check_temperature(recipe.rollout.temperature, "rollout.")
    if recipe.moe.routing_replay == "r2":
        raise InputError(
            "moe.routing_replay is r2, which replays a pass before the update: operations have none; "
            "take r3 or off"
        )
    if optimizer.lr_decay_style != "constant" and optimizer.lr_decay_steps is None:
        raise InputError(
            f"optimizer.lr_decay_style is {optimizer.lr_decay_style}, and a session does not know how "
            "many steps there will be; give optimizer.lr_decay_steps"
        )
