"""Which ranks and nodes an engine spans, and which sizes SGLang can share out."""

from __future__ import annotations

import pytest

from mrl.config import RolloutConfig
from mrl.errors import InputError
from mrl.preflight.engine_layout import check_engine_sizes, engine_layout
from parallel.dims import ModelSizes

QWEN3_30B = ModelSizes(48, 32, 4, 151_936, 0, 128, 768)


def rollout(ranks: int, experts: int = 1, replicas: int = 1) -> RolloutConfig:
    return RolloutConfig(
        max_response_len=8,
        tensor_parallel_size=ranks,
        expert_parallel_size=experts,
        data_parallel_attention_size=replicas,
    )


def test_an_engine_above_a_node_spans_whole_ones() -> None:
    layout = engine_layout(rollout(16), 32, 8)
    assert (layout.num_engines, layout.num_nodes, layout.ranks_per_node) == (2, 2, 8)
    leaders = [rank for rank in range(32) if layout.leads_node(rank)]
    assert leaders == [0, 8, 16, 24]
    assert [layout.node_of(rank) for rank in leaders] == [0, 1, 0, 1]
    small = engine_layout(rollout(2), 16, 8)
    assert (small.num_engines, small.num_nodes, small.ranks_per_node) == (8, 1, 2)
    assert small.describe() == "8 engine(s) of 2 rank(s)"
    assert layout.describe() == "2 engine(s) of 16 rank(s) on 2 nodes"


@pytest.mark.parametrize(
    ("ranks", "world", "local", "message"),
    [
        (3, 8, 8, r"8 rank\(s\) are not divisible by 3 \(8 = 2 x 3 \+ 2\)"),
        (12, 24, 8, r"spans whole nodes, and 12 is not divisible by the 8 ranks of a node"),
        (4, 12, 6, r"6 ranks of a node are not divisible by 4"),
    ],
)
def test_engines_that_do_not_fit_their_nodes_are_refused(ranks, world, local, message) -> None:
    with pytest.raises(InputError, match=f"^rollout.tensor_parallel_size: .*{message}"):
        engine_layout(rollout(ranks), world, local)


@pytest.mark.parametrize(
    "sizes", [(1,), (4,), (8,), (16,), (8, 8), (16, 16, 4), (32, 8, 8), (32, 1, 4)]
)
def test_sizes_that_sglang_takes(sizes) -> None:
    check_engine_sizes(rollout(*sizes), QWEN3_30B)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64,), "32 heads are not divisible by 64"),
        ((8, 3), r"8 rank\(s\) of an engine are not divisible by 3"),
        ((8, 1, 3), "data_parallel_attention_size: 8 rank"),
        ((512, 256, 512), "expert_parallel_size: 128 experts are not divisible by 256"),
    ],
)
def test_sizes_that_sglang_refuses(sizes, message) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        check_engine_sizes(rollout(*sizes), QWEN3_30B)
    assert "\n" not in str(refusal.value)


def test_heads_that_neither_split_nor_replicate_are_refused() -> None:
    model = ModelSizes(2, 12, 4, 96, 0, 8, 96)
    check_engine_sizes(rollout(2), model)
    check_engine_sizes(rollout(12), model)
    with pytest.raises(InputError, match="4 key/value heads can neither be split nor replicated"):
        check_engine_sizes(rollout(6), model)
    with pytest.raises(InputError, match="expert_parallel_size is 2, but the model has no experts"):
        check_engine_sizes(rollout(2, 2), ModelSizes(2, 12, 4, 96, 96, 0))


@pytest.mark.parametrize("text", ["0", "-2", "all", ""])
def test_a_wrong_number_of_ranks_of_the_node_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(InputError, match="LOCAL_WORLD_SIZE: got"):
        engine_layout(rollout(1), 8)
