"""The names and shapes of a model's weights, against which an update is checked while it is sent.

SGLang itself ignores unknown names, keeps the old value of a weight that is not sent, and dies if a
shape is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrl.engines.sglang.quantized import engine_modules
from mrl.errors import InputError
from mrl.kernels.digest import digest_place
from mrl.quantization import Scheme, is_quantized
from mrl.types import WeightBucket

LAYER = re.compile(r"^model\.layers\.(\d+)\.")
STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
"""Names of gpt-oss's tensors that hold the weights or biases of all experts of a layer."""
OUTPUT_LAYER = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


Shapes = Mapping[str, tuple[int, ...]]


class Arrivals:
    """The expected names and shapes of the weights in an update, and a record of those that arrived."""

    def __init__(self, shapes: Shapes, optional: Collection[str] = (), *, of: str) -> None:
        """Weights with `optional` names may be missing. An optional name that is not in `shapes` may
        have any shape. `of` is the word for the owner of the weights in error messages, such as
        `checkpoint`."""
        self._shapes, self._optional, self._of = dict(shapes), set(optional), of
        self._seen: set[str] = set()
        self._dtypes: set[torch.dtype] = set()

    @property
    def required(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights that must arrive, by name."""
        return {name: shape for name, shape in self._shapes.items() if name not in self._optional}

    def arriving(self, buckets: Iterable[WeightBucket], version: int) -> Iterator[WeightBucket]:
        """Check the buckets of one update, and yield each after its check.

        Raises ValueError for a bucket of another version, for a weight that is unknown, has another
        shape or arrived before, and if the buckets end without all weights or without a last bucket.
        """
        self._seen, self._dtypes = set(), set()
        is_complete = False
        for bucket in buckets:
            if bucket.version != version:
                raise ValueError(
                    f"update_weights: got a bucket of version {bucket.version}, expected {version}"
                )
            self._check(bucket)
            if bucket.is_last:
                self._check_complete()
            yield bucket
            is_complete = bucket.is_last
        self._check_complete()
        if not is_complete:
            raise ValueError("update_weights: the buckets ended without one that says is_last")

    def _check(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket.tensors:
            if name not in self._shapes and name not in self._optional:
                raise ValueError(
                    f"update_weights: got {name!r}, which the {self._of} does not have"
                )
            expected = self._shapes.get(name, tuple(tensor.shape))
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"update_weights: {name!r}: got shape {list(tensor.shape)}, expected "
                    f"{list(expected)} as in the {self._of}"
                )
            if name in self._seen:
                raise ValueError(f"update_weights: got {name!r} twice")
            self._seen.add(name)
            self._dtypes.add(tensor.dtype)

    def _check_complete(self) -> None:
        """Raise ValueError if a weight is missing, because the engine would keep its old value."""
        missing = sorted(self._shapes.keys() - self._seen - self._optional)
        if missing:
            raise ValueError(
                f"update_weights: got {len(self._seen)} weights, expected {len(missing)} more: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            )


class Manifest(Arrivals):
    """The names and shapes of a checkpoint's weights, and a record of the weights that arrived."""

    def __init__(self, folder: Path, config: Any, scheme: Scheme | None = None) -> None:
        """Read the headers of the safetensors files in `folder`. Raises InputError if there is no
        file, or a file is damaged. `config` is the Hugging Face config. With a `scheme`, matrices
        arrive quantised, each with its scales."""
        shapes = _shapes_in(folder)
        if getattr(config, "model_type", "") == "gpt_oss":
            shapes = dict(_by_expert(shapes))
        # The trainer dequantises a checkpoint whose weights are stored in fp8 blocks.
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("_scale_inv")}
        self.quantized_modules: set[str] = set()
        """Names of the engine's modules that compute with quantised weights."""
        if scheme is not None:
            self.quantized_modules = engine_modules(shapes)
            shapes |= {
                name + scheme.suffix: scheme.scale_shape(*shape)
                for name, shape in shapes.items()
                if is_quantized(name, len(shape))
            }
        # Layers for multi-token prediction are after the last one, or have names of their own. The
        # engine does not load them, and the trainer does not send them.
        optional = {
            name
            for name in shapes
            if name.startswith("mtp.")
            or ((match := LAYER.match(name)) and int(match[1]) >= config.num_hidden_layers)
        }
        self._is_tied: bool = config.tie_word_embeddings
        if self._is_tied:
            optional.add(OUTPUT_LAYER)
        super().__init__(shapes, optional, of="checkpoint")
        required = {digest_place(name) for name in self.required}
        self.optional_places = {digest_place(name) for name in optional} - required
        """Modules (as named by `mrl.kernels.digest.digest_place`) whose weights an engine need not
        hold."""

    def with_tied_output(self, sent: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
        """Return the digests by module that the engine should report if the weights with the digests
        `sent` were sent. `held` are the digests that it reports. If the embedding is tied and the
        engine still holds a separate output layer, this layer must equal the embedding."""
        output = digest_place(OUTPUT_LAYER)
        if not self._is_tied or output not in held:
            return dict(sent)
        return {**sent, output: sent[digest_place(EMBEDDING)]}

    def dtype_hint(self, held: set[str]) -> str:
        """Return a part of an error message that names the dtypes of the weights as they were sent and
        as the engine holds them (`held`); empty if these are the same."""
        sent = {str(dtype).removeprefix("torch.") for dtype in self._dtypes}
        if sent == held:
            return ""
        return (
            f" (sent as {', '.join(sorted(sent))}, held as {', '.join(sorted(held))}: only an engine "
            "that holds every value exactly is accepted; rollout.dtype says what it should hold)"
        )


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - it is no dict
                    shapes[name] = tuple(weights.get_slice(name).get_shape())
        except SafetensorError as error:
            raise InputError(f"model.path: {file} is damaged: {error}") from None
    if not shapes:
        raise InputError(f"model.path {folder}: no *.safetensors there, expected the weights")
    return shapes


def _by_expert(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes as a trainer sends the weights: those that the checkpoint has in one tensor
    [E, in, out] or [E, out] for all experts of a layer arrive expert by expert."""
    for name, shape in shapes.items():
        if (match := STACKED.fullmatch(name)) is None:
            yield name, shape
            continue
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up" else ("down_proj",)
        num_experts, *inner, rows = shape
        for expert in range(num_experts):
            for part in parts:
                own = f"{match[1]}.{expert}.{part}.{'bias' if match[3] else 'weight'}"
                yield own, (rows // len(parts), *inner)
