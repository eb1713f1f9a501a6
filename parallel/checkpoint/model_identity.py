"""Which model a checkpoint is of: what is written about it, and how it differs from another."""

from __future__ import annotations

import dataclasses
from typing import Any

from parallel.megatron_model import MegatronModel


def describe_model(model: MegatronModel) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says about a model; JSON-able."""
    hf = model.weights.model
    adapter = None if model.lora is None else dataclasses.asdict(model.lora.setup.adapter)
    return {
        "path": str(hf.path),
        "config": hf.config,
        "architecture": hf.named,
        **({} if adapter is None else {"lora": adapter}),
    }


def other_model(saved: dict[str, Any] | None, model: MegatronModel) -> str | None:
    """Say in words where the saved model differs from ours; None where it does not."""
    if saved is None:
        return "it has no critic"
    ours, config = model.weights.model, saved["config"]
    here, there = ours.config.get("model_type"), config.get("model_type")
    if here != there:  # its settings cannot be compared
        return f"model_type {there} there, {here} here"
    found = ours.differences(dataclasses.replace(ours, config=config))
    return ", ".join(found) or _other_adapter(saved.get("lora"), describe_model(model).get("lora"))


def _other_adapter(there: dict[str, Any] | None, here: dict[str, Any] | None) -> str | None:
    if there is None and here is None:
        return None
    if there is None:
        return (
            "it holds all weights of the model, and this run trains a LoRA adapter (remove `lora`)"
        )
    if here is None:
        return (
            f"it holds a LoRA adapter of rank {there['rank']} alone, and this run trains all weights "
            "(give its `lora` branch)"
        )
    different = [
        f"lora {name} {_plain(there[name])} there, {_plain(here[name])} here"
        for name in here
        if _plain(there.get(name)) != _plain(here[name])
    ]
    return ", ".join(different) or None


def _plain(value: Any) -> Any:
    """A tuple of ours is a list in JSON."""
    return list(value) if isinstance(value, tuple) else value
