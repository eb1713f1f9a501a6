"""This module reads the tensors of a Hugging Face folder, one at a time."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from mrl.errors import InputError
from parallel.hf_config import HfModel


class HfTensors:
    """`HfTensors` reads the tensors of a model folder by name, when they are asked for."""

    def __init__(self, model: HfModel) -> None:
        self.path = model.path
        self._files = [safe_open(str(file), framework="pt") for file in _weight_files(model.path)]
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

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise InputError(
                f"{self.path}: no weight {name!r} in {len(self._files)} safetensors file(s); the "
                "folder does not match its config.json"
            )
        return self._where[name].get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    """The files of the index; a folder may hold the same weights in another format beside them."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    files = [
        folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
    ]
    if missing := [file.name for file in files if not file.is_file()]:
        raise InputError(
            f"{folder}: {index.name} lists {missing[0]}, which is not there; download it again"
        )
    return files


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
