"""The layers of each pipeline stage, and how many of their parameters one rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mrl.planner.parts import Part, Tensors
from mrl.planner.shape import ModelShape
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Stage:
    """A pipeline stage. The parameter counts are for one rank of the stage."""

    index: int
    layers: tuple[int, ...]
    """0-based indices of the layers in all chunks of the stage."""
    chunk_layers: int
    """Number of layers in the largest chunk."""
    parts: tuple[Part, ...]
    """The model's parameters on this stage, before tensor and expert parallelism shard them."""
    adapter: tuple[Part, ...]
    """The adapter's parameters on this stage. If there are any, `parts` are frozen."""
    exported: tuple[Part, ...]
    """`parts` without the last stage's copy of a tied embedding, which a weight sync does not
    export."""
    mtp: tuple[Part, ...]
    """The parameters of MTP layers, which are on the last stage, are always trained, and are not
    among `parts`, because only training passes use them."""
    has_embedding: bool
    has_output: bool
    dense: int
    """Number of trained parameters that data- and context-parallel ranks replicate."""
    expert: int
    """Number of trained expert parameters. Only expert-data-parallel ranks replicate them."""
    whole: int
    """How many of the `dense` parameters are not sharded by tensor parallelism. Their gradients are
    summed over the tensor-parallel ranks."""
    expert_whole: int
    """How many of the `expert` parameters are not sharded by expert-tensor parallelism. Their gradients
    are summed over the expert-tensor-parallel ranks."""
    frozen: int
    """Number of parameters that have neither a gradient nor optimizer state."""

    @property
    def num_trained(self) -> int:
        return self.dense + self.expert

    @property
    def num_local(self) -> int:
        return self.num_trained + self.frozen

    @property
    def trained(self) -> tuple[Part, ...]:
        """The trained parts: the adapter's, or all parts that are not always frozen."""
        own = (part for part in self.parts if not part.is_frozen)
        return self.adapter or (*own, *self.mtp)


def expert_data_parallel(dims: ParallelDims) -> int:
    """Return the number of copies of an expert: world / (etp x ep x pp)."""
    return dims.world // (dims.etp * dims.ep * dims.pp)


def local_count(part: Part, dims: ParallelDims) -> int:
    """Return how many parameters of `part` one rank of its pipeline stage holds."""
    ways = {"whole": 1, "tensor": dims.tp, "expert": dims.ep * dims.etp, "expert_whole": dims.ep}
    return -(-part.num // ways[part.sharing])


def is_expert(part: Part) -> bool:
    """Return whether the part belongs to routed experts."""
    return part.sharing in ("expert", "expert_whole")


def local_tensors(part: Part, dims: ParallelDims) -> Tensors:
    """Return the tensors of `part` on one rank of its pipeline stage."""
    if is_expert(part):
        etp = dims.etp if part.sharing == "expert" else 1
        return tuple((-(-count // dims.ep), -(-numel // etp)) for count, numel in part.tensors)
    ways = dims.tp if part.sharing == "tensor" else 1
    return tuple((count, -(-numel // ways)) for count, numel in part.tensors)


def router_bias_bytes(shape: ModelShape, layers: Iterable[int]) -> int:
    """Return the bytes of the routers' balancing biases in `layers`.

    The biases are fp32 buffers, which are exported together with the weights.
    """
    routers = {*shape.moe_layers, *mtp_layers(shape)}
    return 4 * shape.num_experts * shape.expert_bias * len(set(layers) & routers)


def mtp_layers(shape: ModelShape) -> tuple[int, ...]:
    """Return the 0-based indices of the MTP layers, after those of the other layers."""
    return tuple(range(shape.num_layers, shape.num_layers + shape.num_mtp))


def mtp_parts(shape: ModelShape) -> tuple[Part, ...]:
    """Return the parameters of the MTP layers: a decoder layer each, three norms, and the projection
    of embedding and hidden state, which tensor-parallel ranks replicate."""
    size = shape.hidden
    norms = Part("norms", "whole", ((3, size),), 3 * size)
    projection = Part("mtp", "whole", ((1, 2 * size * size),), 2 * size * size, is_muons=True)
    return tuple(p for n in mtp_layers(shape) for p in (*shape.layer(n), norms, projection))


def indexer_norm_bytes(shape: ModelShape, num_layers: int, weight_bytes: int) -> int:
    """Return by how many bytes the norms of `num_layers` indexers, which are fp32, exceed those of as
    many weights."""
    return num_layers * (4 - weight_bytes) * sum(shape.indexer.norm) if shape.indexer else 0


def split_layers(num_layers: int, dims: ParallelDims) -> list[list[range]]:
    """Return the range of 0-based layer indices of each chunk, indexed by [pipeline rank][chunk].

    As in Megatron, the first chunks of all ranks get the first layers, the second chunks of all ranks
    get the next ones, and so on. `dims.check_model` must have passed.
    """
    given = {0: dims.first_layers, dims.pp - 1: dims.last_layers}
    given = {stage: count for stage, count in given.items() if count is not None}
    left = num_layers - sum(given.values())
    counts = [given[p] if p in given else left // (dims.pp - len(given)) for p in range(dims.pp)]
    assert sum(counts) == num_layers, "call dims.check_model first"
    assert not any(count % dims.vpp for count in counts), "call dims.check_model first"
    split: list[list[range]] = [[] for _ in counts]
    start = 0
    for _ in range(dims.vpp):
        for chunks, count in zip(split, counts, strict=True):
            chunks.append(range(start, start + count // dims.vpp))
            start = chunks[-1].stop
    return split


def stages(shape: ModelShape, dims: ParallelDims) -> list[Stage]:
    """Return the pipeline stages of the layout, in order."""
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
        parts.append(shape.embedding())  # the last stage needs its own copy of the tied matrix
    adapter = (
        [part for n in layers for part in shape.adapter.layers[n].parts] if shape.adapter else []
    )
    mtp = mtp_parts(shape) if last else ()
    own = [part for part in parts if not part.is_frozen]
    trained = adapter if shape.adapter else (*own, *mtp)
    frozen = parts if shape.adapter else [part for part in parts if part.is_frozen]
    shares = [(part, local_count(part, dims)) for part in trained]
    return Stage(
        index=index,
        layers=layers,
        chunk_layers=max(map(len, chunks)),
        parts=tuple(parts),
        adapter=tuple(adapter),
        exported=exported,
        mtp=mtp,
        has_embedding=first,
        has_output=last,
        dense=sum(n for part, n in shares if not is_expert(part)),
        expert=sum(n for part, n in shares if is_expert(part)),
        whole=sum(n for part, n in shares if part.sharing == "whole"),
        expert_whole=sum(n for part, n in shares if part.sharing == "expert_whole"),
        frozen=sum(local_count(part, dims) for part in frozen),
    )
