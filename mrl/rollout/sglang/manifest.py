"""Which weights a model has, so that an update can be checked before and after it is sent.

SGLang skips a name that it does not know, keeps the old value of one that never comes, and dies of
a wrong shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrl.errors import InputError
from mrl.kernels.digest import digest_place
from mrl.types import WeightBucket

LAYER = re.compile(r"^model\.layers\.(\d+)\.")
OUTPUT_LAYER = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


Shapes = Mapping[str, tuple[int, ...]]


class Arrivals:
    """The names and shapes that an update must bring, and those that it has brought."""

    def __init__(self, shapes: Shapes, optional: Collection[str] = (), *, of: str) -> None:
        """`optional` names may stay away; those that are not in `shapes` may have any shape. `of` is
        what has these weights, in an error's words."""
        self._shapes, self._optional, self._of = dict(shapes), set(optional), of
        self._seen: set[str] = set()
        self._dtypes: set[torch.dtype] = set()

    @property
    def required(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what must come, by name."""
        return {name: shape for name, shape in self._shapes.items() if name not in self._optional}

    def begin(self) -> None:
        """Forget what earlier updates brought."""
        self._seen = set()
        self._dtypes = set()

    def check(self, bucket: WeightBucket) -> None:
        """Raises ValueError for a weight that is unknown, of another shape, or here again."""
        for name, tensor in bucket.tensors:
            if name not in self._shapes and name not in self._optional:
                raise ValueError(f"update_weights: got {name!r}, which the {self._of} has not")
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

    def check_complete(self) -> None:
        """Raises ValueError where a weight never came: the engine would keep the old one."""
        missing = sorted(self._shapes.keys() - self._seen - self._optional)
        if missing:
            raise ValueError(
                f"update_weights: got {len(self._seen)} weights, expected {len(missing)} more: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            )


class Manifest(Arrivals):
    """The names and shapes of a checkpoint's weights, and those that an update has brought."""

    def __init__(self, folder: Path, config: Any) -> None:
        """Reads headers only. Raises InputError where there is no readable safetensors file."""
        shapes = _shapes_in(folder)
        # Layers past the last are for multi-token prediction; nobody trains or loads them here.
        optional = {
            name
            for name in shapes
            if (match := LAYER.match(name)) and int(match[1]) >= config.num_hidden_layers
        }
        self._is_tied: bool = config.tie_word_embeddings
        if self._is_tied:
            optional.add(OUTPUT_LAYER)
        super().__init__(shapes, optional, of="checkpoint")
        required = {digest_place(name) for name in self.required}
        self.optional_places = {digest_place(name) for name in optional} - required
        """Places of weights that an engine need not hold, as in `mrl.kernels.digest.digest_place`."""

    def with_tied_output(self, sent: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
        """What the engine should hold: where it has an output layer of its own, the tied embedding."""
        output = digest_place(OUTPUT_LAYER)
        if not self._is_tied or output not in held:
            return dict(sent)
        return {**sent, output: sent[digest_place(EMBEDDING)]}

    def dtype_hint(self, held: set[str]) -> str:
        """Explain, for a message about differing weights, whether a dtype is the cause."""
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
