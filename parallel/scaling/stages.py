"""What each pipeline rank holds: its layers and its share of their parameters."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.scaling.shape import ModelShape, Part


@dataclass(frozen=True)
class Stage:
    """One pipeline rank. All counts are of one rank of it unless said otherwise."""

    index: int
    layers: tuple[int, ...]
    """0-based, of all its chunks."""
    chunk_layers: int
    """Layers of its largest chunk."""
    parts: tuple[Part, ...]
    """Whole parameters, before tensor and expert parallelism share them out."""
    has_embedding: bool
    has_output: bool
    dense: int
    """Parameters that data parallelism copies (times context parallelism)."""
    expert: int
    """Parameters that only expert-data parallelism copies."""
    whole: int
    """Of `dense`, those that every tensor-parallel rank holds: their gradients are summed over it."""

    @property
    def num_local(self) -> int:
        return self.dense + self.expert


def expert_data_parallel(dims: ParallelDims) -> int:
    """Copies of an expert: world / (etp x ep x pp)."""
    return dims.world // (dims.etp * dims.ep * dims.pp)


def local_count(part: Part, dims: ParallelDims) -> int:
    """Parameters of `part` on one rank of its pipeline stage."""
    ways = {"whole": 1, "tensor": dims.tp, "expert": dims.ep * dims.etp}[part.sharing]
    return -(-part.num // ways)


def split_layers(num_layers: int, pp: int, vpp: int) -> list[list[range]]:
    """0-based layers by [pipeline rank][chunk]; chunk c of rank p is Megatron's number c x pp + p.

    Where the layers do not divide, the last rank gets the short rest (Megatron's
    num_layers_in_last_pipeline_stage). Raises InputError where no rest is left.
    """
    if num_layers % (pp * vpp) == 0:
        size = num_layers // (pp * vpp)
        starts = [[(c * pp + p) * size for c in range(vpp)] for p in range(pp)]
        return [[range(s, s + size) for s in chunks] for chunks in starts]
    size = -(-num_layers // pp)
    if vpp > 1 or size * (pp - 1) >= num_layers:
        raise InputError(
            f"parallel: {num_layers} layers do not divide into {pp} pipeline ranks x {vpp} chunks "
            f"({num_layers} = {num_layers // (pp * vpp)} x {pp * vpp} + {num_layers % (pp * vpp)}); "
            "choose sizes that divide them"
        )
    return [[range(p * size, min((p + 1) * size, num_layers))] for p in range(pp)]


def stages(shape: ModelShape, dims: ParallelDims) -> list[Stage]:
    """Every pipeline rank of the layout, in order."""
    split = split_layers(shape.num_layers, dims.pp, dims.vpp)
    return [_stage(shape, dims, p, chunks) for p, chunks in enumerate(split)]


def _stage(shape: ModelShape, dims: ParallelDims, index: int, chunks: list[range]) -> Stage:
    first, last = index == 0, index == dims.pp - 1
    layers = tuple(number for chunk in chunks for number in chunk)
    parts = [part for number in layers for part in shape.layer(number)]
    if first:
        parts.append(shape.embedding())
    if last:
        # Behind another stage, a tied head is a copy of the embedding.
        parts += [shape.final_norm(), shape.output()]
        parts += [shape.embedding()] if shape.tied and not first else []
    shares = [(part, local_count(part, dims)) for part in parts]
    return Stage(
        index=index,
        layers=layers,
        chunk_layers=max(map(len, chunks)),
        parts=tuple(parts),
        has_embedding=first,
        has_output=last,
        dense=sum(n for part, n in shares if part.sharing != "expert"),
        expert=sum(n for part, n in shares if part.sharing == "expert"),
        whole=sum(n for part, n in shares if part.sharing == "whole"),
    )
