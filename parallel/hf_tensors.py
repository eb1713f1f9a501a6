"""This module reads the tensors of a Hugging Face folder, one at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.errors import InputError
from mrl.system.heartbeat import beat
from mrl.system.json_text import parse_json
from parallel.hf_config import HfModel

LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDINGS = "model.embed_tokens.weight"


class HfTensors:
    """`HfTensors` reads the tensors of a model folder by name, when they are asked for."""

    def __init__(self, model: HfModel) -> None:
        self.path = model.path
        self._files = [_open(file) for file in _weight_files(model.path)]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._where.clear()
        self._files.clear()

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type of a tensor in the words of safetensors (`BF16`), without reading it."""
        return self._where[name].get_slice(name).get_dtype()

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Read the rows from `start` to before `end` of a tensor with at least one dimension."""
        beat()
        return self._where[name].get_slice(name)[start:end]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise InputError(
                f"{self.path}: no weight {name!r} in {len(self._files)} safetensors file(s); the "
                "folder does not match its config.json"
            )
        beat()
        return self._where[name].get_tensor(name)


def _open(file: Path) -> Any:
    if file.is_symlink() and not file.exists():
        raise InputError(
            f"model.path: {file} is a link to {file.readlink()}, which is not there; copy the model "
            "with its files (cp -L), or download it again"
        )
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"model.path: {file} is no whole safetensors file ({error}); download it again, or remove "
            "it where it is no part of the model"
        ) from None


def _weight_files(folder: Path) -> list[Path]:
    """The files of the index; a folder may hold the same weights in another format beside them."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    where = f"model.path: {index}"
    try:
        names = set(parse_json(index.read_text(), where)["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    except InputError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{where} is no index of safetensors files, a JSON object with `weight_map` "
            f"({type(error).__name__}: {error}); download it again"
        ) from None
    if outside := [name for name in sorted(names) if Path(name).name != name]:
        raise InputError(
            f"model.path: {index} lists {outside[0]!r}, expected names of files beside it; download it "
            "again"
        )
    try:
        missing = [file.name for file in files if not (file.is_file() or file.is_symlink())]
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.path: {index} lists what cannot be a file's name ({error}); download it again"
        ) from None
    if missing:
        raise InputError(
            f"{folder}: {index.name} lists {missing[0]}, which is not there; download it again"
        )
    return files


def check_sizes(model: HfModel, tensors: HfTensors) -> None:
    """Raise InputError where config.json has more layers than the weights, or other embeddings."""
    config, sizes = model.config, model.sizes
    layers = {int(found[1]) for name in tensors.names if (found := LAYER.match(name))}
    missing = sorted(set(range(sizes.num_layers)) - layers)
    if layers and missing:  # an architecture from outside may name its layers otherwise
        raise InputError(
            f"model.path: {model.path}/config.json has {sizes.num_layers} layers, but there are no "
            f"weights of layer {missing[0]}; correct config.json or download the weights again"
        )
    expected = (sizes.vocab_size, config.get("hidden_size"))
    if EMBEDDINGS in tensors and expected[1] and tensors.shape(EMBEDDINGS) != expected:
        found = " x ".join(map(str, tensors.shape(EMBEDDINGS)))
        raise InputError(
            f"model.path: {model.path}/config.json has vocab_size x hidden_size {expected[0]} x "
            f"{expected[1]}, but the weights {EMBEDDINGS!r} are {found}; correct config.json"
        )


def check_names(model: HfModel, names: set[str]) -> None:
    """Raise InputError for a weight in the folder that the model would silently not have."""
    config, sizes = model.config, model.sizes
    known = {"lm_head.weight"} if model.tied_embeddings else set()
    for name in (name for rule in model.architecture.rules(config) for name in rule.hf):
        layers = range(sizes.num_layers if "{layer}" in name else 1)
        experts = range(sizes.num_experts if "{expert}" in name else 1)
        known |= {name.format(layer=n, expert=e) for n in layers for e in experts}
    left_out = tuple(model.architecture.unread(config))
    unknown = sorted(
        name
        for name in names - known
        if not name.startswith(left_out) and not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise InputError(
            f"{model.path}: {len(unknown)} weight(s) that a {config['model_type']} model with this "
            f"config.json does not have, e.g. {unknown[0]!r}; correct config.json or remove them"
        )
