"""The tensors of a Hugging Face folder, read one at a time."""

from __future__ import annotations

from safetensors import safe_open
from torch import Tensor

from mrl.errors import InputError
from parallel.hf_config import HfModel


class HfTensors:
    """Lazy access to the tensors of a model folder by name."""

    def __init__(self, model: HfModel) -> None:
        self.path = model.path
        self._files = [
            safe_open(str(file), framework="pt")
            for file in sorted(model.path.glob("*.safetensors"))
        ]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._where.clear()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise InputError(
                f"{self.path}: no weight {name!r} in {len(self._files)} safetensors file(s); the "
                "folder does not match its config.json"
            )
        return self._where[name].get_tensor(name)
