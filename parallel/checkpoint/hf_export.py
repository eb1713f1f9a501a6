"""Export a checkpoint of any layout to a Hugging Face folder, in one process and without Megatron.

Megatron parameters are read whole, one at a time, and split into their HF tensors. The peak memory
is one output file and one parameter. A checkpoint of an adapter becomes a PEFT folder or, if the
adapter is merged, a folder with the whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config.adapter import Adapter
from mrl.errors import InputError
from mrl.quantization import SCHEMES, fp8_config, quantized_tensors
from mrl.version import __version__
from parallel.architectures import find_architecture
from parallel.architectures.base import Rule, rule_pattern
from parallel.architectures.mtp import MTP
from parallel.checkpoint.hf_writer import copy_files, new_folder, write_safetensors
from parallel.checkpoint.manifest import read_manifest, step_of
from parallel.checkpoint.model_identity import saved_adapter
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.hf_config import HfModel, has_weights
from parallel.hf_tensors import HfTensors
from parallel.lora.merge import merged_tensors
from parallel.lora.peft_folder import write_peft_folder
from parallel.lora.rules import adapter_rules
from parallel.shards import split
from parallel.stacked import stored_tensors

TAGS = ("reinforcement-learning", "mrl")


@dataclass(frozen=True)
class Exported:
    step: int
    what: str
    """The contents of the folder: `weights`, `adapter`, or `base with the adapter merged`."""
    num_files: int
    num_tensors: int
    num_untrained: int = 0
    """Number of the tensors that were copied from the model folder (`untrained_tensors`)."""


def export_checkpoint(
    folder: Path,
    target: Path,
    *,
    base: Path | None,
    max_bytes: int,
    notes: dict[str, str],
    architecture: str | None = None,
    merged: bool = False,
    quantization: str = "none",
) -> Exported:
    """Convert the checkpoint `folder`, which must be undamaged, to a model folder `target`.

    An adapter's checkpoint becomes a PEFT folder or, with `merged`, a model folder whose weights
    include the adapter. `base` is the model folder that has the tokenizer and the frozen weights;
    by default it is the folder that the run trained from. Tensors of that folder that mrl does not
    train, such as those of multi-token-prediction layers, are copied. `notes` are additional rows of
    the model card's table. `architecture` says where the file of the recipe's `model.architecture` is
    now; by default it is where the run found it. Each weight file has at most `max_bytes`, unless a
    single tensor is larger. `target` gets its name only when it is complete. `quantization` is `none`,
    `fp8_block` or `fp8_block_ue8m0` (see `rollout.quantization`).

    Raises InputError

    - if `target` cannot be made, or exists and is not empty,
    - if the architecture is missing,
    - if the model folder is missing, or is not the base model of the adapter to merge (a PEFT folder
      needs no model folder),
    - if the checkpoint is a critic's,
    - if `merged` is set for a checkpoint without an adapter, or
    - if `quantization` is set for an adapter that is not merged.

    Raises DiskFailed if a file cannot be written.
    """
    content = read_manifest(folder)
    adapter = saved_adapter(content["model"])
    if merged and adapter is None:
        raise InputError(
            f"--merged: checkpoint {folder} holds all weights, and no adapter to merge; leave it out"
        )
    model = _read_model(content, base, architecture)
    saved = SavedTensors(folder)
    if any(key.startswith(f"model.{MTP}") for key in saved):
        model = model.training_mtp()
    refuse_critic(folder, saved, model)
    untrained: list[str] = []
    if adapter is None or merged:
        _check_base(model)
        untrained = untrained_names(model)
    elif quantization != "none":
        raise InputError(
            f"--quantization {quantization}: checkpoint {folder} is an adapter, which is not "
            "quantised; leave it out, or add --merged"
        )
    with new_folder(target) as partial:
        if adapter is not None and not merged:
            what, tensors = "adapter", adapter_tensors(saved, model, adapter)
            path = os.path.abspath(model.path)
            num_files, num_tensors = 1, write_peft_folder(partial, tensors, adapter, model, path)
        else:
            what, tensors = "weights", _with_mtp_copies(hf_tensors(saved, model), model)
            if adapter is not None:
                what = "base with the adapter merged"
                tensors = merged_tensors(saved, model, adapter, getattr(torch, content["dtype"]))
            dtype = getattr(torch, content["dtype"])
            if untrained:
                tensors = chain(tensors, untrained_tensors(model, untrained, dtype))
            tensors = stored_tensors(tensors, model)
            if quantization != "none":
                tensors = quantized_tensors(tensors, SCHEMES[quantization])
            where = write_safetensors(partial, tensors, max_bytes)
            num_files, num_tensors = len(set(where.values())), len(where)
            _write_config(partial, model.config, content["dtype"], quantization, where)
            copy_files(model.path, partial)
        name = Path(os.path.abspath(target)).name
        card = model_card(
            name,
            model.path.resolve().name,
            content,
            notes,
            merged=merged,
            is_moe=bool(model.moe_layer_numbers),
        )
        (partial / "README.md").write_text(card)
    return Exported(step_of(folder), what, num_files, num_tensors, len(untrained))


def _read_model(content: dict[str, Any], base: Path | None, architecture: str | None) -> HfModel:
    """Return the model that a manifest describes. Its folder is `base`, or by default the folder
    that the run trained from. Raises InputError if the model's architecture is not found."""
    config = dict(content["model"]["config"])
    named = architecture or content["model"].get("architecture")
    try:
        found = find_architecture(config, named)
    except InputError as error:
        if named is None or architecture is not None:
            raise
        hint = "if it is elsewhere, say where it is now with --architecture FILE"
        raise InputError(f"{error}; {hint}") from None
    return HfModel(base or Path(content["model"]["path"]), config, found, named)


def _check_base(model: HfModel) -> None:
    if not (model.path / "config.json").is_file():
        raise InputError(
            f"no model folder {model.path}, from which the tokenizer is copied; give the base model's "
            "folder with --model PATH"
        )


def refuse_critic(folder: Path, saved: SavedTensors, model: HfModel) -> None:
    """Raise InputError if the checkpoint is a critic's. A critic's checkpoint is recognized by the
    size of its head."""
    head, vocab_size = "model.output_layer.weight", model.sizes.vocab_size
    if head in saved and saved.shape(head)[0] != vocab_size:
        raise InputError(
            f"checkpoint {folder} is a critic's: its head has {saved.shape(head)[0]} row(s), not the "
            f"{vocab_size} of the vocabulary; it has no Hugging Face form, give one of the policy"
        )


def adapter_tensors(
    saved: SavedTensors, model: HfModel, adapter: Adapter
) -> Iterator[tuple[str, Tensor]]:
    """Yield every A and every B matrix of an adapter once, under PEFT's names and in the training
    dtype."""
    return hf_tensors(saved, model, adapter_rules(model.architecture.rules(model.config), adapter))


def hf_tensors(
    saved: SavedTensors, model: HfModel, table: Iterable[Rule] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor once, layer by layer, in the training dtype.

    `table` has the rules of the parameters, by default those of the model. Raises ValueError if a
    weight of the checkpoint has no rule.
    """
    table = model.architecture.rules(model.config) if table is None else table
    rules = [(rule_pattern(rule), rule) for rule in table]
    places = [
        _place(key.removeprefix("model."), rules) for key in saved if key.startswith("model.")
    ]
    num_groups = model.sizes.num_query_groups
    heads_per_group = model.sizes.num_attention_heads // num_groups
    for layer, expert, name, rule in sorted(places, key=lambda place: place[:3]):
        parts = split(saved[f"model.{name}"], rule.split, num_groups, heads_per_group)
        names = [hf.format(layer=layer, expert=expert) for hf in rule.hf]
        yield from zip(names, parts, strict=True)


def _with_mtp_copies(
    tensors: Iterable[tuple[str, Tensor]], model: HfModel
) -> Iterator[tuple[str, Tensor]]:
    """Yield the `tensors` of a model. If its MTP layers are trained, also yield the copies of embedding
    and output layer that the model folder has for them, with the new values."""
    copies: dict[str, list[str]] = {}
    architecture = model.architecture
    if architecture.num_trained_mtp and architecture.mtp is not None and has_weights(model.path):
        with HfTensors(model) as known:
            for copy, original in architecture.mtp.copies(model.config).items():
                if copy in known:
                    copies.setdefault(original, []).append(copy)
    for name, tensor in tensors:
        yield name, tensor
        yield from ((copy, tensor.clone()) for copy in copies.get(name, ()))


def untrained_names(model: HfModel) -> list[str]:
    """Return the sorted names of the tensors of the model folder that mrl does not read
    (`Architecture.unread`).

    There are none if the folder has no weights. Raises InputError if a file of weights is missing or
    damaged.
    """
    prefixes = tuple(model.architecture.unread(model.config))
    if not prefixes or not has_weights(model.path):
        return []
    with HfTensors(model) as tensors:
        return sorted(name for name in tensors.names if name.startswith(prefixes))


def untrained_tensors(
    model: HfModel, names: Iterable[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the model folder as they are stored. Those that are stored in fp8 blocks are
    dequantised to `dtype`."""
    with HfTensors(model) as tensors:
        for name in names:
            tensor = tensors[name]
            yield name, tensor.to(dtype) if tensors.is_quantized(name) else tensor


def _place(name: str, rules: list[tuple[re.Pattern[str], Rule]]) -> tuple[int, int, str, Rule]:
    for pattern, rule in rules:
        if found := pattern.fullmatch(name):
            place = found.groupdict()
            return int(place.get("layer", -1)), int(place.get("expert", -1)), name, rule
    raise ValueError(f"no rule for the weight {name}")


def _write_config(
    folder: Path, config: dict[str, Any], dtype: str, quantization: str, names: Collection[str]
) -> None:
    """Write config.json with the dtype (`dtype` in transformers 5, `torch_dtype` in transformers 4)
    and, for weights in fp8 blocks, DeepSeek-V3's `quantization_config`."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if quantization != "none":
        config["quantization_config"] = fp8_config(quantization, _unquantized(names))
    assert isinstance(getattr(torch, dtype), torch.dtype)
    named = {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps({**config, **named}, indent=2) + "\n")


def _unquantized(names: Collection[str]) -> list[str]:
    """Return the names of the modules that are stored without scales, except norms and embeddings.
    `names` are the names of all weights in the folder."""
    modules = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    return [
        module
        for module in modules
        if f"{module}.weight_scale_inv" not in names
        and not module.endswith(("norm", "embed_tokens"))
    ]


def model_card(
    name: str,
    base: str,
    content: dict[str, Any],
    notes: dict[str, str],
    *,
    merged: bool = False,
    is_moe: bool = True,
) -> str:
    """Return the text of README.md for an exported folder, with the front matter that model hubs
    read."""
    adapter = saved_adapter(content["model"])
    tags = ("mixture-of-experts", *TAGS) if is_moe else TAGS
    library, what, of_adapter = "transformers", base, {}
    if adapter is not None:
        library, what, tags = "peft", f"A LoRA adapter of {base}", (*tags, "lora")
        of_adapter = {
            "rank": str(adapter.rank),
            "alpha": f"{adapter.alpha:g}",
            "adapted modules": ", ".join(adapter.modules) or "none",
            **({"adapted experts": adapter.experts} if is_moe else {}),
        }
    if merged:
        what, library = f"{base} with a LoRA adapter merged into its weights", "transformers"
    rows = {
        "base model": base,
        **of_adapter,
        "training step": str(content["step"]),
        "dtype": content["dtype"],
        **notes,
        **{f"{package} version": version for package, version in content["versions"].items()},
        "exported with mrl": __version__,
    }
    front = "".join(f"- {tag}\n" for tag in tags)
    return (
        f"---\nlibrary_name: {library}\ntags:\n{front}---\n\n# {name}\n\n"
        f"{what}, trained with mrl: reinforcement learning on Megatron-core and SGLang.\n\n"
        "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    )
