"""Read the tensors of a Hugging Face folder one at a time. Check their names and sizes, and that
all values are finite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.errors import InputError
from mrl.kernels.block_quant import dequantize_fp8_blocks
from mrl.system.heartbeat import beat
from mrl.system.json_text import parse_json
from parallel.hf_config import HfModel, stored_quantization
from parallel.stacked import slices_of

LAYER = re.compile(r"model\.layers\.(\d+)\.")
SCALES = "_scale_inv"
"""The suffix of scales: a weight NAME that is stored in fp8 blocks has its scales in the tensor
NAME_scale_inv."""
BLOCK = 128
EMBEDDINGS = "model.embed_tokens.weight"


class HfTensors:
    """The tensors of a model folder by name. A tensor is read from the disk when it is accessed.

    The constructor raises InputError for a missing or damaged file. Access raises InputError for a
    name that the folder lacks.

    If the folder's weights are stored in fp8 blocks (DeepSeek-V3's format), a weight is dequantised
    when it is accessed, and the scales are not among the names.

    A tensor that holds the weights of all experts (`Architecture.stacked`) is not among the names.
    Instead the experts' weights are, as if the folder had them apart.
    """

    def __init__(self, model: HfModel) -> None:
        self.path = model.path
        self._files = [_open(file) for file in _weight_files(model.path)]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._slices = slices_of(model, self._where)
        self._check_stacked(model.sizes.num_experts)
        for name, piece in self._slices.items():
            self._where[name] = self._where[piece.stored]
        for stored in {piece.stored for piece in self._slices.values()}:
            del self._where[stored]
        self._scales: dict[str, Any] = {}
        """Maps the name of each quantised weight to the open file that holds its scales."""
        if stored_quantization(model.config, str(model.path)) is not None:
            for name in [name for name in self._where if name.endswith(SCALES)]:
                self._scales[name.removesuffix(SCALES)] = self._where.pop(name)
            for name in self._scales:
                self._check_scales(name)
        for name in self._where:
            self._refuse_unscaled(name)

    def _check_stacked(self, num_experts: int) -> None:
        """Raise InputError if a tensor of all experts is not of so many, or cannot be taken apart."""
        for stored, num_parts in {(p.stored, p.num_parts) for p in self._slices.values()}:
            shape = list(self._where[stored].get_slice(stored).get_shape())
            if len(shape) < 2 or shape[0] != num_experts or shape[-1] % num_parts:
                raise InputError(
                    f"{self.path}: {stored} is {shape}, expected {num_experts} experts in the first "
                    f"dimension, and a multiple of {num_parts} in the last of two or three"
                )

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._where.clear()
        self._scales.clear()
        self._files.clear()

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is stored in fp8 blocks, so that reading dequantises it."""
        return name in self._scales

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading the tensor."""
        if piece := self._slices.get(name):
            return piece.shape(self._where[name].get_slice(piece.stored).get_shape())
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type of a tensor as safetensors names it (`BF16`), without reading the tensor.
        A weight that is dequantised has the type `F32`."""
        return "F32" if name in self._scales else self._stored_dtype(name)

    def _stored_dtype(self, name: str) -> str:
        piece = self._slices.get(name)
        return self._where[name].get_slice(piece.stored if piece else name).get_dtype()

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Read the rows [start, end) of a tensor with at least one dimension. The rows of a quantised
        weight are not multiplied by their scales."""
        if name in self._slices:
            return self[name][start:end]
        beat()
        rows = self._where[name].get_slice(name)[start:end]
        return rows.float() if name in self._scales else rows

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise InputError(
                f"{self.path}: no weight {name!r} in {len(self._files)} safetensors file(s); the "
                "folder does not match its config.json"
            )
        beat()
        if piece := self._slices.get(name):
            return piece.take(self._where[name].get_slice(piece.stored))
        tensor = self._where[name].get_tensor(name)
        if name not in self._scales:
            return tensor
        return dequantize_fp8_blocks(tensor, self._scales_of(name), torch.float32)

    def _scales_of(self, name: str) -> Tensor:
        return self._scales[name].get_tensor(name + SCALES).float()

    def _check_scales(self, name: str) -> None:
        """Raise InputError unless the quantised weight `name` has a positive scale for each block."""
        where = f"model.path: {self.path}: {name}"
        if name not in self._where:
            raise InputError(f"{where}: there are scales, but no such weight; download it again")
        dtype, scales = self._where[name].get_slice(name).get_dtype(), self._scales_of(name)
        expected = tuple(-(-size // BLOCK) for size in self.shape(name))
        if dtype != "F8_E4M3" or tuple(scales.shape) != expected:
            raise InputError(
                f"{where} is {dtype} with scales {shape_in_words(tuple(scales.shape))}, expected "
                f"F8_E4M3 with scales {shape_in_words(expected)}, one for each {BLOCK} x {BLOCK} block"
            )
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise InputError(f"{where}: expected finite, positive scales; download it again")

    def _refuse_unscaled(self, name: str) -> None:
        """Raise InputError if the weight `name` is stored in 8-bit floats and has no scales. Its
        numbers would be taken for those of the model."""
        dtype = self._stored_dtype(name)
        if name in self._scales or not dtype.startswith("F8"):
            return
        cause = "download it again"
        if name + SCALES in self._where:
            cause = "config.json has no quantization_config that names them; correct it"
        raise InputError(
            f"model.path: {self.path}: {name} is {dtype}, expected scales {name + SCALES!r} for it; "
            f"{cause}"
        )


def shape_in_words(shape: tuple[int, ...]) -> str:
    """Return a shape in words, such as `64 x 32`, for a message."""
    return " x ".join(map(str, shape)) or "a single number"


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
    """Return the files that the index lists, or all safetensors files if there is no index.

    A folder may also contain the same weights in another format, which the index does not list.
    Raises InputError if the index is invalid or lists a missing file.
    """
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
            f"model.path: {index} lists {outside[0]!r}, expected names of files in its own folder; "
            "download it again"
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
    """Raise InputError if a layer that config.json implies has no weights, or if the embedding has
    another shape than config.json says."""
    config, sizes = model.config, model.sizes
    layers = {int(found[1]) for name in tensors.names if (found := LAYER.match(name))}
    missing = sorted(set(range(sizes.num_layers)) - layers)
    if layers and missing:  # a user's own architecture may name its layers differently
        raise InputError(
            f"model.path: {model.path}/config.json has {sizes.num_layers} layers, but there are no "
            f"weights of layer {missing[0]}; correct config.json or download the weights again"
        )
    expected = (sizes.vocab_size, config.get("hidden_size"))
    if EMBEDDINGS in tensors and expected[1] and tensors.shape(EMBEDDINGS) != expected:
        raise InputError(
            f"model.path: {model.path}/config.json has vocab_size x hidden_size {expected[0]} x "
            f"{expected[1]}, but the weights {EMBEDDINGS!r} are "
            f"{shape_in_words(tensors.shape(EMBEDDINGS))}; correct config.json"
        )


def check_names(model: HfModel, names: set[str]) -> None:
    """Raise InputError for a weight in the folder that loading would silently ignore."""
    config, sizes = model.config, model.sizes
    known = {"lm_head.weight"} if model.tied_embeddings else set()
    if model.architecture.mtp is not None:
        known |= model.architecture.mtp.copies(config).keys()
    for rule in model.architecture.rules(config):
        for name in rule.hf:
            layers = range(sizes.num_layers if "{layer}" in name else 1)
            experts = range(sizes.num_experts if "{expert}" in name else 1)
            numbers = layers if rule.layers is None else rule.layers
            known |= {name.format(layer=n, expert=e) for n in numbers for e in experts}
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


MAX_SAMPLED = 400
"""The largest number of tensors that are sampled, separately for experts' tensors and for all others.
It is limited because the disk may be slow."""
NUM_PARTS = 3
"""The number of places at which a sampled tensor is read: its start, its middle and its end."""
PART_ELEMENTS = 4096
WHOLE_ELEMENTS = 1 << 24
"""The number of elements of a tensor that are in memory at once when all numbers are read."""


def check_finite_tensors(model: HfModel, tensors: HfTensors, *, whole: bool = False) -> None:
    """Raise an InputError that names the first tensor in which a NaN or an infinity is found.

    With `whole` every number is read, which may take long. Otherwise only a few rows of many
    tensors are read. These are enough to find the weights of a run that diverged, which have NaN or
    infinity in long stretches. A part of a file that was never written is not found: it reads as
    zeros.
    """
    for name in _chosen(sorted(tensors.names), whole=whole):
        for part in _parts(tensors, name, whole=whole):
            if part.is_floating_point() and not bool(part.isfinite().all()):
                number = part[~part.isfinite()][0].item()
                raise InputError(
                    f"model.path: {model.path}: {name} holds {number}, expected finite numbers; "
                    "download the weights again, or take an earlier checkpoint (mrl check --deep reads "
                    "every number)"
                )


def _chosen(names: list[str], *, whole: bool) -> list[str]:
    """Return the names of the tensors to read: all names if `whole`, and otherwise evenly spaced
    names, at most MAX_SAMPLED of experts' tensors and at most MAX_SAMPLED of other tensors."""
    if whole:
        return names
    kinds = [[n for n in names if (".experts." in n) == is_expert] for is_expert in (False, True)]
    return [n for kind in kinds for n in kind[:: max(1, -(-len(kind) // MAX_SAMPLED))]]


def _parts(tensors: HfTensors, name: str, *, whole: bool) -> Iterator[Tensor]:
    """Yield parts of a tensor: all of its rows if `whole`, and otherwise a few rows at its start,
    in its middle and at its end. A tensor without rows is one part."""
    shape = tensors.shape(name)
    if not shape or 0 in shape:
        yield tensors[name]
        return
    row = max(1, torch.Size(shape).numel() // shape[0])
    if whole:
        step = max(1, WHOLE_ELEMENTS // row)
        starts = range(0, shape[0], step)
    else:
        step = max(1, PART_ELEMENTS // row)
        last = max(0, shape[0] - step)
        starts = sorted({last * part // (NUM_PARTS - 1) for part in range(NUM_PARTS)})
    for start in starts:
        yield tensors.rows(name, start, min(start + step, shape[0]))
