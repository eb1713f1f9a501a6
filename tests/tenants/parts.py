"""A service of toy size and recipes of tenants, as the tests of this folder need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.config import ServiceConfig
from mrl.toy_model import write_toy_model


def make_model(folder: Path) -> None:
    write_toy_model(folder / "model", seed=0)


def service(folder: Path, model: Path, **keys: Any) -> ServiceConfig:
    """A service in `folder/service`; `keys` are branches, or parts of them."""
    tree = {
        "model": {"path": str(model / "model"), "dtype": "float32"},
        "rollout": {"max_total_tokens": 4096},
        "lora": {"max_rank": 8},
        "output_dir": str(folder / "service"),
    }
    for name, value in keys.items():
        tree[name] = tree.get(name, {}) | value if isinstance(value, dict) else value
    return ServiceConfig.model_validate(tree)


def tenant(output: Path, **keys: Any) -> dict[str, Any]:
    """The keys of a tenant's recipe, without those that belong to the service."""
    tree = {
        "lora": {"rank": 4},
        "train": {"num_steps": 3},
        "rollout": {"max_response_len": 8},
        "reward": "first_char",
        "data": {"path": "data.jsonl"},
        "output_dir": str(output),
    }
    for name, value in keys.items():
        tree[name] = tree.get(name, {}) | value if isinstance(value, dict) else value
    return tree


def session(output: Path) -> dict[str, Any]:
    """The keys of a session's recipe."""
    return {"lora": {"rank": 4}, "output_dir": str(output)}
