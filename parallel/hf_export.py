"""A checkpoint of any layout -> a Hugging Face model folder, in one process and without Megatron.

One Megatron parameter at a time is read whole and split into its HF tensors; memory peaks at one output
file and one parameter.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl import __version__
from mrl.errors import InputError
from parallel.architectures import load_architecture
from parallel.architectures.base import Rule, rule_pattern
from parallel.hf_config import HfModel
from parallel.hf_writer import write_safetensors
from parallel.manifest import read_manifest, step_of
from parallel.saved_tensors import SavedTensors
from parallel.shards import split

COPIED = (
    "tokenizer*", "chat_template*", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "preprocessor_config.json", "LICENSE*",
)  # fmt: skip
"""Of the base model's folder. Code files are not copied."""


@dataclass(frozen=True)
class Exported:
    step: int
    num_files: int
    num_tensors: int


def export_checkpoint(
    folder: Path, target: Path, *, base: Path | None, max_bytes: int, notes: dict[str, str]
) -> Exported:
    """Write a whole, undamaged checkpoint `folder` as a model folder `target`.

    `base`: the model folder that has the tokenizer; by default the one that was trained. `notes`: rows
    of the model card. `target` appears under its name only when it is whole.

    Raises InputError where `target` is not empty or `base` is not there.
    """
    content = read_manifest(folder)
    source = base or Path(content["model"]["path"])
    if not (source / "config.json").is_file():
        raise InputError(
            f"no model folder {source}, from which the tokenizer is copied; give the base model's "
            "folder with --model PATH"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is not an empty folder; give a new one")
    config = dict(content["model"]["config"])
    model = HfModel(source, config, load_architecture(config["model_type"]))
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tensors = hf_tensors(SavedTensors(folder), model)
        where = write_safetensors(partial, tensors, max_bytes)
        _write_config(partial, config, content["dtype"])
        for pattern in COPIED:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
        card = model_card(target.name, source.resolve().name, content, notes)
        (partial / "README.md").write_text(card)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(step_of(folder), len(set(where.values())), len(where))


def hf_tensors(saved: SavedTensors, model: HfModel) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor once, layer by layer, in the dtype of training.

    Raises ValueError where a weight of the checkpoint has no rule.
    """
    rules = [(rule_pattern(rule), rule) for rule in model.architecture.rules(model.config)]
    places = [
        _place(key.removeprefix("model."), rules) for key in saved if key.startswith("model.")
    ]
    num_groups = model.sizes.num_query_groups
    heads_per_group = model.sizes.num_attention_heads // num_groups
    for layer, expert, name, rule in sorted(places, key=lambda place: place[:3]):
        parts = split(saved[f"model.{name}"], rule.split, num_groups, heads_per_group)
        names = [hf.format(layer=layer, expert=expert) for hf in rule.hf]
        yield from zip(names, parts, strict=True)


def _place(name: str, rules: list[tuple[re.Pattern[str], Rule]]) -> tuple[int, int, str, Rule]:
    for pattern, rule in rules:
        if found := pattern.fullmatch(name):
            place = found.groupdict()
            return int(place.get("layer", -1)), int(place.get("expert", -1)), name, rule
    raise ValueError(f"no rule for the weight {name}")


def _write_config(folder: Path, config: dict[str, Any], dtype: str) -> None:
    """transformers 5 calls the key `dtype`, 4 `torch_dtype`."""
    assert isinstance(getattr(torch, dtype), torch.dtype)
    named = {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps({**config, **named}, indent=2) + "\n")


def model_card(name: str, base: str, content: dict[str, Any], notes: dict[str, str]) -> str:
    """README.md with the front matter that model hubs read."""
    rows = {
        "base model": base,
        "training step": str(content["step"]),
        "dtype": content["dtype"],
        **notes,
        **{f"{package} version": version for package, version in content["versions"].items()},
        "exported with mrl": __version__,
    }
    return (
        f"---\nbase_model: {json.dumps(base)}\nlibrary_name: transformers\n"
        "tags:\n- mixture-of-experts\n- reinforcement-learning\n- mrl\n---\n\n"
        f"# {name}\n\n{base}, trained with mrl: reinforcement learning on Megatron-core and SGLang.\n\n"
        "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    )
