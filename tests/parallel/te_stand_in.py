"""TransformerEngine's own Python modules on a CPU: `python -m tests.parallel.te_stand_in SITE FOLDER`.

SITE holds the package as its wheel lays it out (requirements/te.txt). Only what is compiled has a
stand-in: its enumerations are numbered in the order in which they are asked for, and any function that
is called raises. Construction of the layers calls none; a forward pass would.

For each Hugging Face folder in FOLDER, mrl's own `build_chunks` builds the model with these layers and
with local ones, and loads the weights into both. What was found goes to FOLDER/found.json.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch


class StandIn(type):
    """A class of the compiled library: an enumeration, if it is asked for members; no instances."""

    def __new__(mcs, name: str) -> StandIn:
        made = super().__new__(mcs, name, (), {})
        type.__setattr__(made, "numbers", {})
        return made

    def __init__(cls, name: str) -> None:
        super().__init__(name, (), {})

    @property
    def __members__(cls) -> dict[str, int]:
        return dict(cls.numbers)

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.numbers.setdefault(name, len(cls.numbers))

    def __call__(cls, *_: object, **__: object) -> None:
        raise RuntimeError(f"transformer_engine_torch.{cls.__name__} was called: it is compiled")


class Library(types.ModuleType):
    """`transformer_engine_torch`: whatever is asked for is there."""

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, StandIn(name))
        return self.__dict__[name]


def import_transformer_engine(site: Path) -> Any:
    """Import `transformer_engine.pytorch` from `site`. Call it before Megatron is imported."""
    sys.path.insert(0, str(site))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: load no shared library
    sys.modules["transformer_engine_torch"] = Library("transformer_engine_torch")
    # Needs the onnx packages, for an export that nobody here asks for.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it finds no compiled library
        common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    return importlib.import_module("transformer_engine.pytorch")


def build(folder: Path, implementation: Any) -> Any:
    """The chunk of one rank with the weights of `folder` in it; its parameters by Megatron's names."""
    from mrl.config import ParallelConfig
    from parallel.dims import ParallelDims
    from parallel.hf_config import HfModel
    from parallel.mesh import init_mesh
    from parallel.model import build_chunks, unwrap
    from parallel.transformer_config import build_config
    from parallel.weights import WeightMap

    mesh = init_mesh(ParallelDims.create(ParallelConfig(), 1), 0)
    model = HfModel.read(folder)
    config = build_config(model, mesh.dims, mesh.device, torch.float32, implementation, False, 0.0)
    # Its modules refuse to be made where torch sees no GPU; the tensors stay on the CPU.
    with mock.patch("torch.cuda.is_available", return_value=True):
        chunks = build_chunks(model, mesh, config, implementation)
    WeightMap(model, mesh, chunks).load()
    return dict(unwrap(chunks[0]).named_parameters())


def compare(folder: Path) -> dict[str, Any]:
    from parallel.mesh import destroy_mesh
    from parallel.weights import canonical_name

    local = build(folder, "local")
    destroy_mesh()
    engine = build(folder, "transformer_engine")
    destroy_mesh()
    renamed = {canonical_name(name): value for name, value in engine.items()}
    local = {canonical_name(name): value for name, value in local.items()}
    return {
        "names": sorted(engine),
        "missing": sorted(set(local) - set(renamed)),
        "unknown": sorted(set(renamed) - set(local)),
        "differ": [n for n in local.keys() & renamed if not torch.equal(local[n], renamed[n])],
        "flags": {n: getattr(value, "allreduce", True) for n, value in engine.items()},
    }


def megatron_names() -> dict[str, bool]:
    """Which of TransformerEngine's functions Megatron has found: what its fusions stand on."""
    wanted = {
        "megatron.core.transformer.moe.moe_utils": (
            "fused_permute", "fused_unpermute", "fused_sort_chunks_by_index", "te_general_gemm",
        ),
        "megatron.core.models.common.embeddings.rope_utils": (
            "fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd",
        ),
    }  # fmt: skip
    return {
        f"{module}.{name}": getattr(importlib.import_module(module), name, None) is not None
        for module, names in wanted.items()
        for name in names
    }


def packed_arguments(te: Any) -> list[str]:
    """Fields of Megatron's packed batches that its attention does not take."""
    import dataclasses

    from megatron.core.packed_seq_params import PackedSeqParams

    taken = set(inspect.signature(te.DotProductAttention.forward).parameters)
    return sorted({field.name for field in dataclasses.fields(PackedSeqParams)} - taken)


def main(site: Path, folder: Path) -> None:
    te = import_transformer_engine(site)
    from parallel import prepare

    prepare()
    engine: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    found = {
        "have_te": engine.HAVE_TE,
        "functions": megatron_names(),
        "not_taken": packed_arguments(te),
        "adam": optimizer.Adam.__module__,
        "models": {path.name: compare(path) for path in sorted(folder.iterdir()) if path.is_dir()},
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
