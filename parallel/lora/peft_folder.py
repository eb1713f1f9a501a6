"""Read and write PEFT's folder of an adapter: adapter_config.json and adapter_model.safetensors.

A written file has one matrix per expert, with the expert's index in its name
(`...experts.7.gate_proj.lora_A.weight`), even if the experts share the matrix. SGLang, vLLM and
PEFT can all read this form. This module reads such files, files with shared matrices under names
without an index, and the form that PEFT itself writes with transformers 5 (`fused_experts.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrl.config.adapter import PEFT_PREFIX, Adapter
from mrl.errors import InputError
from parallel.expected_tensors import FLOATS
from parallel.hf_config import HfModel
from parallel.hf_tensors import shape_in_words
from parallel.lora.fused_experts import find_fused
from parallel.lora.peft_config import CONFIG, PeftConfig, read_peft_config
from parallel.lora.rules import adapter_shapes, names_in_files

WEIGHTS = "adapter_model.safetensors"
NUM_CACHED = 4
"""The number of matrices that stay in memory after they were read from the file. Without this
cache, a fused matrix would be read once for each of its experts."""


class PeftFolder(Mapping[str, Tensor]):
    """The matrices of an adapter by the names of `adapter_shapes`. A matrix is read from the file
    when it is accessed.

    The constructor reads only headers, and raises InputError if the folder does not hold exactly
    this adapter of this model. Access raises InputError if a number is not finite, or if the file
    has different values for a matrix that the experts should share.
    """

    def __init__(self, folder: Path, adapter: Adapter, model: HfModel) -> None:
        if folder.is_file():
            raise InputError(f"lora.path: {folder} is a file; give the folder that holds it")
        if not folder.is_dir():
            raise InputError(f"lora.path: there is no folder {folder}; give one that PEFT wrote")
        config = read_peft_config(folder, adapter)
        self._where = f"lora.path: {folder / WEIGHTS}"
        self._file = _open(folder)
        self._shapes = adapter_shapes(model, adapter)
        self._copies = names_in_files(model, adapter)
        names = list(self._file.keys())
        slices = {name: self._file.get_slice(name) for name in names}
        in_file = {name: tuple(one.get_shape()) for name, one in slices.items()}
        self._in_file, self._rank = in_file, adapter.rank
        self._fused = find_fused(model, adapter, in_file, config)
        self._whole = lru_cache(maxsize=NUM_CACHED)(self._read)
        self._check_names()
        for name in names:
            if (dtype := slices[name].get_dtype()) not in FLOATS:
                raise InputError(
                    f"{self._where}: {name} is stored as {dtype}, expected one of {', '.join(FLOATS)}; "
                    "save the adapter in bf16 or fp32"
                )
        self._check_shapes()
        self._check_scales(adapter, config)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        first, *others = (self._matrix(one) for one in self._sources(name))
        if any(not first.equal(other) for other in others):
            raise InputError(
                f"{self._where}: the experts of a layer differ in {_module(name)}, and with "
                "lora.experts=shared_outer they have one matrix; give lora.experts=per_expert"
            )
        return first

    def check_numbers(self) -> None:
        """Read all matrices.

        Raises InputError for numbers that are not finite, and for different values of a matrix that
        the experts should share.
        """
        for name in self:
            self[name]

    def _sources(self, name: str) -> list[str]:
        return [name] if name in self._in_file else self._copies[name]

    def _matrix(self, name: str) -> Tensor:
        """Return the matrix called `name` in PEFT's files. If the file has only a fused matrix that
        contains it, the part is taken out of the fused matrix."""
        if name in self._in_file:
            return self._whole(name)
        fused, matrix, expert, number = self._fused[name]
        return fused.part(self._whole(fused.name(matrix)), matrix, expert, number, self._rank)

    def _read(self, name: str) -> Tensor:
        tensor = self._file.get_tensor(name)
        if not bool(tensor.isfinite().all()):
            number = tensor[~tensor.isfinite()][0].item()
            raise InputError(
                f"{self._where}: {name} holds {number}, expected finite numbers; take an earlier "
                "adapter"
            )
        return tensor

    def _check_names(self) -> None:
        """Raise InputError if the file lacks a matrix of the adapter, or has a matrix for which the
        recipe does not ask."""
        used, missing = set(), []
        for name in self:
            for source in self._sources(name):
                if source in self._fused and source not in self._in_file:
                    fused, matrix, *_ = self._fused[source]
                    used.add(fused.name(matrix))
                elif source in self._in_file:
                    used.add(source)
                else:
                    missing.append(source)
        unknown = [name for name in sorted(self._in_file) if name not in used]
        if not missing and not unknown:
            return
        what, names = ("has no", missing) if missing else ("also has", unknown)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InputError(
            f"{self._where} {what} {names[0]}{more}; it adapts {_modules(self._in_file)}, and the "
            f"recipe {_modules(self)}: give the lora.targets and lora.experts that it was trained with"
        )

    def _check_shapes(self) -> None:
        for name, expected in self._shapes.items():
            for source in self._sources(name):
                found = self._in_file.get(source, expected)
                if found != expected:
                    raise InputError(
                        f"{self._where}: {source} is {shape_in_words(found)}, expected "
                        f"{shape_in_words(expected)} (rank {self._rank} of this model); give the "
                        "adapter's own rank and base model"
                    )

    def _check_scales(self, adapter: Adapter, config: PeftConfig) -> None:
        in_file = {source for name in self for source in self._sources(name)} - self._fused.keys()
        for name in sorted(in_file):
            if (scale := config.scale_of(_module(name))) != adapter.scale:
                raise InputError(
                    f"{self._where}: {_module(name)} has the scale {scale:g} (alpha_pattern), expected "
                    f"lora.alpha / lora.rank = {adapter.scale:g} as all others have; multiply its B by "
                    "the quotient of the two, or merge it into the model"
                )


def write_peft_folder(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    adapter: Adapter,
    model: HfModel,
    base: str,
) -> int:
    """Write an adapter into an existing folder; return the number of tensors in the file.

    `tensors` must have the names of `adapter_shapes`. `base` is the name or path of the base model.
    Raises ValueError if the names are not exactly those of the adapter.
    """
    copies = names_in_files(model, adapter)
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    if found.keys() != copies.keys():
        odd = sorted(found.keys() ^ copies.keys())
        raise ValueError(f"these are not the matrices of the adapter: {odd[0]}")
    # A clone for each name, because safetensors does not accept two names of one storage.
    in_file = {one: found[name].clone() for name, ones in copies.items() for one in ones}
    file = folder / WEIGHTS
    save_file(in_file, file, metadata={"format": "pt"})
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read it
    (folder / CONFIG).write_text(json.dumps(adapter.peft_config(base), indent=2) + "\n")
    return len(in_file)


def _open(folder: Path) -> safe_open:
    file = folder / WEIGHTS
    if not file.exists() and (folder / "adapter_model.bin").exists():
        raise InputError(
            f"lora.path: {folder} has adapter_model.bin, a pickle, which can run code when it is read, "
            f"expected {WEIGHTS}; load it in PEFT and save it again"
        )
    if not file.exists():
        raise InputError(f"lora.path: {folder} has no {WEIGHTS}; give a folder that PEFT wrote")
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"lora.path: {file} is no whole safetensors file ({error}); copy the adapter again"
        ) from None


def _module(name: str) -> str:
    """Return the name of the module to which a matrix belongs, such as
    `model.layers.0.self_attn.q_proj`."""
    return name.removeprefix(PEFT_PREFIX).partition(".lora_")[0]


def _modules(names: Iterable[str]) -> str:
    """Return a string for a message: the modules to which the matrices `names` belong, each as the
    last part of its name, such as `q_proj`."""
    found = {_module(name).removesuffix(".base_layer").rpartition(".")[2] for name in names}
    return ", ".join(sorted(found)) or "nothing"
