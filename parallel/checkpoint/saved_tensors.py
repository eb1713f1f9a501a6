"""Read whole tensors from a checkpoint one at a time, without Megatron or a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from parallel.checkpoint.pickle_scan import check_pickles


class _Reader(dcp.FileSystemReader):
    """A reader that reads `.metadata`, which may be large, only once. After `show`, torch sees only
    one key of it.

    torch plans each load over all keys that it sees, so reading n tensors one by one would otherwise
    take time proportional to n^2.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = super().read_metadata()
        self._shown = self.metadata

    def show(self, key: str) -> None:
        entry = self.metadata.state_dict_metadata[key]
        self._shown = replace(self.metadata, state_dict_metadata={key: entry})

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._shown


class SavedTensors:
    """The tensors of a checkpoint folder by key, such as `model.decoder.final_layernorm.weight`. A
    tensor is read when it is accessed.

    The constructor raises InputError if a pickle in the folder would import anything that a
    checkpoint does not need.
    """

    def __init__(self, folder: Path) -> None:
        check_pickles(folder)
        self._reader = _Reader(folder)
        self._tensors = {
            key: entry
            for key, entry in self._reader.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].size)

    def __getitem__(self, key: str) -> Tensor:
        entry = self._tensors[key]
        state: dict[str, Tensor] = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        self._reader.show(key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=self._reader, no_dist=True)
        return state[key]
