"""Whole tensors are read out of a checkpoint one at a time, without Megatron or process group."""

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
    """Reads `.metadata` once; of a large model it is as long as a book.

    torch plans a load over all keys that it is shown, so that it is shown only the wanted one: reading
    n tensors one by one would take n^2 steps.
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
    """This mapping holds the tensors of a checkpoint folder by key, e.g.
    `model.decoder.final_layernorm.weight`.

    Raises InputError where a pickle of the folder names anything that does not belong there.
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
