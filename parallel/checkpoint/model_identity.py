"""The identity of the model that a checkpoint belongs to: the model's entry in the manifest, and
the comparison of that model with a run's model."""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.config.adapter import Adapter
from parallel.architectures.mtp import MTP
from parallel.hf_config import HfModel


def describe_model(model: HfModel, adapter: Adapter | None) -> dict[str, Any]:
    """Return the manifest's entry for a model, as a JSON-serializable dict."""
    return {
        "path": str(model.path),
        "config": model.config,
        "architecture": model.named,
        **({} if adapter is None else {"lora": dataclasses.asdict(adapter)}),
    }


def saved_adapter(model: dict[str, Any]) -> Adapter | None:
    """Return a checkpoint's adapter, given the manifest's entry for the model; None if the
    checkpoint holds all weights.
    """
    lora: dict[str, Any] | None = model.get("lora")
    if lora is None:
        return None
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in lora.items()
    }
    return Adapter(**fields)


def refusal(
    saved: dict[str, Any] | None, model: HfModel, adapter: Adapter | None, path: str = "model.path"
) -> str | None:
    """Return the reason why a run with this model and adapter cannot load a checkpoint; None if it
    can.

    `saved` is the manifest's entry for the model, or None if the checkpoint has no such model.
    `path` is the recipe key of the model's folder. The reason is a message that continues the words
    "checkpoint FOLDER" and tells the user what to do.
    """
    if saved is None:
        return other_model("it has no critic", path)
    config = saved["config"]
    here, there = model.config.get("model_type"), config.get("model_type")
    if here != there:  # its settings cannot be compared
        return other_model(f"model_type {there} there, {here} here", path)
    if found := model.differences(dataclasses.replace(model, config=config)):
        return other_model(", ".join(found), path)
    return other_adapter(saved_adapter(saved), adapter)


def other_model(difference: str, path: str) -> str:
    """Return the error message for a checkpoint of another model.

    `difference` says how the models differ, and `path` is the recipe key of the model's folder.
    """
    if MTP in difference:
        return (
            f"is of a run with another train.mtp_loss_scaling_factor: {difference}; set it above 0 if "
            "that run did, and to 0 if it did not"
        )
    return (
        f"is of another model: {difference}; give the {path} that it was trained from, or another "
        "output_dir"
    )


def other_adapter(there: Adapter | None, here: Adapter | None) -> str | None:
    """Return the error message for a checkpoint with another adapter; None if the adapters are
    equal.

    `there` is the checkpoint's adapter, and `here` the run's adapter. An adapter is None if all
    weights are trained.
    """
    if there == here:
        return None
    if there is None:
        return (
            "holds all weights of the model, and this run trains a LoRA adapter; leave `lora` out, or "
            "give another output_dir"
        )
    give = "give the `lora` branch that it was trained with, or another output_dir"
    if here is None:
        what = f"holds a LoRA adapter of rank {there.rank} alone"
        return f"{what}, and this run trains all weights; {give}"
    different = ", ".join(
        f"{name} {_plain(old)} there, {_plain(new)} here"
        for name, old in dataclasses.asdict(there).items()
        if old != (new := getattr(here, name))
    )
    return f"holds another LoRA adapter: {different}; {give}"


def _plain(value: Any) -> Any:
    return " ".join(value) or "none" if isinstance(value, tuple) else value
