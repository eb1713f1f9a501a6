"""What each pipeline rank holds: its layers and its share of their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallel.dims import ParallelDims
from parallel.scaling.shape import ModelShape, Part, Tensors


@dataclass(frozen=True)
class Stage:
    """A stage is one pipeline rank. All counts are of one rank of it unless said otherwise."""

    index: int
    layers: tuple[int, ...]
    """0-based, of all its chunks."""
    chunk_layers: int
    """Layers of its largest chunk."""
    parts: tuple[Part, ...]
    """The model's whole parameters, before tensor and expert parallelism share them out."""
    adapter: tuple[Part, ...]
    """Those of an adapter; with one, `parts` are frozen."""
    exported: tuple[Part, ...]
    """The model's parameters without the last stage's copy of a tied embedding."""
    has_embedding: bool
    has_output: bool
    dense: int
    """Trained parameters that data parallelism copies (times context parallelism)."""
    expert: int
    """Trained parameters that only expert-data parallelism copies."""
    whole: int
    """Those of `dense` that every tensor-parallel rank holds: their gradients are summed over it."""
    expert_whole: int
    """Those of `expert` that every expert-tensor-parallel rank holds, summed likewise."""
    frozen: int
    """Parameters without gradient and optimizer state."""

    @property
    def num_trained(self) -> int:
        return self.dense + self.expert

    @property
    def num_local(self) -> int:
        return self.num_trained + self.frozen

    @property
    def trained(self) -> tuple[Part, ...]:
        return self.adapter or self.parts


def expert_data_parallel(dims: ParallelDims) -> int:
    """Copies of an expert: world / (etp x ep x pp)."""
    return dims.world // (dims.etp * dims.ep * dims.pp)


def local_count(part: Part, dims: ParallelDims) -> int:
    """Count the parameters of `part` on one rank of its pipeline stage."""
    return -(-part.num // _ways(part, dims))


def _ways(part: Part, dims: ParallelDims) -> int:
    ways = {"whole": 1, "tensor": dims.tp, "expert": dims.ep * dims.etp, "expert_whole": dims.ep}
    return ways[part.sharing]


def is_expert(part: Part) -> bool:
    """Tell whether the part belongs to experts, one of which only expert-data parallelism copies."""
    return part.sharing in ("expert", "expert_whole")


def local_tensors(part: Part, dims: ParallelDims) -> Tensors:
    """Count the tensors of `part` on one rank of its pipeline stage: (how many, elements of each)."""
    if is_expert(part):
        etp = dims.etp if part.sharing == "expert" else 1
        return tuple((-(-count // dims.ep), -(-numel // etp)) for count, numel in part.tensors)
    ways = dims.tp if part.sharing == "tensor" else 1
    return tuple((count, -(-numel // ways)) for count, numel in part.tensors)


def router_bias_bytes(shape: ModelShape, layers: Iterable[int]) -> int:
    """The routers' balancing biases among `layers`: fp32 buffers that are exported with the weights."""
    return 4 * shape.num_experts * shape.expert_bias * len(set(layers) & set(shape.moe_layers))


def split_layers(num_layers: int, dims: ParallelDims) -> list[list[range]]:
    """0-based layers by [pipeline rank][chunk] of a layout that `dims.check_model` accepts.

    Layers are dealt chunk by chunk, in each from the first rank to the last, as Megatron does.
    """
    given = {0: dims.first_layers, dims.pp - 1: dims.last_layers}
    given = {stage: count for stage, count in given.items() if count is not None}
    left = num_layers - sum(given.values())
    counts = [given[p] if p in given else left // (dims.pp - len(given)) for p in range(dims.pp)]
    assert sum(counts) == num_layers, "check_model comes first"
    assert not any(count % dims.vpp for count in counts), "check_model comes first"
    split: list[list[range]] = [[] for _ in counts]
    start = 0
    for _ in range(dims.vpp):
        for chunks, count in zip(split, counts, strict=True):
            chunks.append(range(start, start + count // dims.vpp))
            start = chunks[-1].stop
    return split


def stages(shape: ModelShape, dims: ParallelDims) -> list[Stage]:
    """List every pipeline rank of the layout, in order."""
    split = split_layers(shape.num_layers, dims)
    return [_stage(shape, dims, p, chunks) for p, chunks in enumerate(split)]


def _stage(shape: ModelShape, dims: ParallelDims, index: int, chunks: list[range]) -> Stage:
    first, last = index == 0, index == dims.pp - 1
    layers = tuple(number for chunk in chunks for number in chunk)
    parts = [part for number in layers for part in shape.layer(number)]
    if first:
        parts.append(shape.embedding())
    if last:
        parts += [shape.final_norm(), shape.output()]
    exported = tuple(parts)
    if last and shape.tied and not first:
        parts.append(shape.embedding())  # a tied head behind another stage
    adapter = (
        [part for n in layers for part in shape.adapter.layers[n].parts] if shape.adapter else []
    )
    base = sum(local_count(part, dims) for part in parts)
    shares = [(part, local_count(part, dims)) for part in (adapter if shape.adapter else parts)]
    return Stage(
        index=index,
        layers=layers,
        chunk_layers=max(map(len, chunks)),
        parts=tuple(parts),
        adapter=tuple(adapter),
        exported=exported,
        has_embedding=first,
        has_output=last,
        dense=sum(n for part, n in shares if not is_expert(part)),
        expert=sum(n for part, n in shares if is_expert(part)),
        whole=sum(n for part, n in shares if part.sharing == "whole"),
        expert_whole=sum(n for part, n in shares if part.sharing == "expert_whole"),
        frozen=base if shape.adapter else 0,
    )
