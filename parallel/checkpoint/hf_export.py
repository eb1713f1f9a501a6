"""A checkpoint of any layout becomes a Hugging Face folder, in one process and without Megatron.

One Megatron parameter at a time is read whole and split into its HF tensors; memory peaks at one output
file and one parameter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mrl import __version__
from mrl.errors import DiskFailed, InputError
from parallel.architectures import find_architecture
from parallel.architectures.base import Rule, rule_pattern
from parallel.checkpoint.hf_writer import write_safetensors
from parallel.checkpoint.manifest import read_manifest, step_of
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.hf_config import HfModel
from parallel.shards import split

COPIED = (
    "tokenizer*", "chat_template*", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "preprocessor_config.json", "LICENSE*",
)  # fmt: skip
"""Files of the base model's folder. Code files are not copied."""


@dataclass(frozen=True)
class Exported:
    step: int
    num_files: int
    num_tensors: int


def export_checkpoint(
    folder: Path,
    target: Path,
    *,
    base: Path | None,
    max_bytes: int,
    notes: dict[str, str],
    architecture: str | None = None,
) -> Exported:
    """Write a whole, undamaged checkpoint `folder` as a model folder `target`.

    `base`: the model folder that has the tokenizer; by default the one that was trained. `notes`: rows
    of the model card. `architecture`: where a `model.architecture` of the recipe is now; by default
    where it was. `target` appears under its name only when it is whole.

    Raises InputError where `target` is not a new or an empty folder or cannot be made, where `base` is
    not there, where the architecture is not, or where the checkpoint is a critic's; DiskFailed where a
    file cannot be written.
    """
    content = read_manifest(folder)
    source = base or Path(content["model"]["path"])
    if not (source / "config.json").is_file():
        raise InputError(
            f"no model folder {source}, from which the tokenizer is copied; give the base model's "
            "folder with --model PATH"
        )
    config = dict(content["model"]["config"])
    named = architecture or content["model"].get("architecture")
    try:
        model = HfModel(source, config, find_architecture(config, named), named)
    except InputError as error:
        if named is None or architecture is not None:
            raise
        hint = "if it is elsewhere, say where it is now with --architecture FILE"
        raise InputError(f"{error}; {hint}") from None
    saved = SavedTensors(folder)
    refuse_critic(folder, saved, model)
    with _new_folder(target) as partial:
        where = write_safetensors(partial, hf_tensors(saved, model), max_bytes)
        _write_config(partial, config, content["dtype"])
        for pattern in COPIED:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
        name = Path(os.path.abspath(target)).name
        card = model_card(name, source.resolve().name, content, notes)
        (partial / "README.md").write_text(card)
    return Exported(step_of(folder), len(set(where.values())), len(where))


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` to write into; it gets that name at the end of the block.

    Raises InputError where that could not be; DiskFailed where writing fails, and then nothing is left.
    """
    target = Path(os.path.abspath(target))  # `.` and `..` are no names to give
    partial = target.parent / f".{target.name}.partial"
    try:
        if os.path.lexists(target):
            if target.is_symlink() or not target.is_dir() or any(target.iterdir()):
                raise InputError(f"{target} is not an empty folder; give a new one")
            if target == Path.cwd():
                raise InputError(f"{target} is the folder that you are in; give a new one")
            target.rmdir()  # now, and not after hours of writing: a mount point cannot be replaced
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"{target} cannot be made: {error.strerror}; give another folder"
        ) from None
    try:
        yield partial
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise DiskFailed(
            f"the export to {target} failed: {error}; no partial output remains"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_critic(folder: Path, saved: SavedTensors, model: HfModel) -> None:
    """Raise InputError where the head is not a vocabulary's: it differs from a policy in that only."""
    head, vocab_size = "model.output_layer.weight", model.sizes.vocab_size
    if head in saved and saved.shape(head)[0] != vocab_size:
        raise InputError(
            f"checkpoint {folder} is a critic's: its head has {saved.shape(head)[0]} row(s), not the "
            f"{vocab_size} of the vocabulary; it has no Hugging Face form, give one of the policy"
        )


def hf_tensors(saved: SavedTensors, model: HfModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor once, layer by layer, in the dtype of training.

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
        "---\nlibrary_name: transformers\n"
        "tags:\n- mixture-of-experts\n- reinforcement-learning\n- mrl\n---\n\n"
        f"# {name}\n\n{base}, trained with mrl: reinforcement learning on Megatron-core and SGLang.\n\n"
        "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    )
