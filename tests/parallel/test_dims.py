"""Sizes: the arithmetic is right, and refusals show it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrl.config import ParallelConfig
from mrl.errors import InputError
from parallel.dims import ModelSizes, ParallelDims

MODEL = ModelSizes(
    num_layers=6,
    num_attention_heads=8,
    num_query_groups=4,
    vocab_size=128,
    dense_ffn_size=96,
    num_experts=8,
    moe_ffn_size=16,
)


def dims(world: int, tp: int = 1, pp: int = 1, ep: int = 1, **more: int) -> ParallelDims:
    config = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        **more,
    )
    return ParallelDims.create(config, world)


def test_data_parallel_size_is_what_is_left() -> None:
    assert dims(8, tp=2, pp=2).dp == 2
    assert dims(8, ep=8).dp == 8
    assert dims(1).dp == 1


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (3, {"tp": 2}, r"3 ranks are not divisible by tensor 2 x context 1 x pipeline 1 = 2"),
        (4, {"pp": 2, "ep": 3}, r"4 ranks .* expert 3 x expert-tensor 1 x pipeline 2 = 6"),
        (
            2,
            {"tp": 2, "context_parallel_size": 2},
            r"2 ranks .* tensor 2 x context 2 x pipeline 1 = 4",
        ),
        (2, {"ep": 2, "expert_tensor_parallel_size": 2}, r"2 ranks .* expert-tensor 2 .* = 4"),
        (2, {"decoder_last_pipeline_num_layers": 1}, r"pipeline_model_parallel_size is 1"),
        (1, {"virtual_pipeline_model_parallel_size": 2}, r"interleaving needs at least 2 stages"),
    ],
)
def test_a_world_that_does_not_divide_is_refused(world: int, sizes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        dims(world, **sizes)


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (8, {"tp": 8}, r"4 query groups .* tensor parallel size 8 \(4 = 0 x 8 \+ 4\)"),
        (4, {"pp": 4}, r"6 layers .* pipeline x virtual parallel size 4 \(6 = 1 x 4 \+ 2\)"),
        (
            4,
            {"pp": 4, "decoder_first_pipeline_num_layers": 1},
            r"5 layers left for the middle .* size 3 \(5 = 1 x 3 \+ 2\)",
        ),
        (2, {"pp": 2, "decoder_last_pipeline_num_layers": 6}, r"leaves 0 for the other 1"),
        (3, {"expert_tensor_parallel_size": 3}, r"16 expert FFN columns .* size 3"),
        (3, {"ep": 3}, r"8 experts .* expert parallel size 3 \(8 = 2 x 3 \+ 2\)"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(world: int, sizes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        dims(world, **sizes).check_model(MODEL)


def test_linear_attention_takes_whole_sequences_and_is_split_by_key_heads() -> None:
    linear = replace(MODEL, linear_key_heads=2)
    dims(4, tp=2, pp=2).check_model(linear)
    context = {"context_parallel_size": 2}
    dims(2, **context).check_model(MODEL)
    with pytest.raises(InputError, match=r"context_parallel_size is 2, .* whole sequences; set it"):
        dims(2, **context).check_model(linear)
    with pytest.raises(InputError, match=r"2 key heads of linear attention .* size 4"):
        dims(4, tp=4).check_model(linear)


def test_experts_with_biases_stay_whole() -> None:
    biased = replace(MODEL, experts_have_bias=True)
    dims(4, tp=2, ep=2).check_model(biased)
    with pytest.raises(
        InputError, match=r"expert_tensor_parallel_size is 2, .* biases, .* set it to"
    ):
        dims(4, tp=2, expert_tensor_parallel_size=2).check_model(biased)


def test_two_stages_can_both_be_given_their_layers() -> None:
    ends = {"decoder_first_pipeline_num_layers": 4}
    dims(2, pp=2, decoder_last_pipeline_num_layers=2, **ends).check_model(MODEL)
    with pytest.raises(InputError, match="leaves 1 for the other 0"):
        dims(2, pp=2, decoder_last_pipeline_num_layers=1, **ends).check_model(MODEL)


def test_every_wrong_size_is_named_at_once() -> None:
    with pytest.raises(InputError, match=r"layers.*") as caught:
        dims(32, tp=8, pp=4).check_model(MODEL)
    assert "query groups" in str(caught.value)


def test_8_bit_products_take_16_rows_of_each_rank() -> None:
    config = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    plain, fp8 = (ParallelDims.create(config, 4, fp8=on) for on in (False, True))
    assert (plain.token_multiple, fp8.token_multiple) == (8, 128)
    assert fp8.token_multiple // (fp8.tp * fp8.cp) % 16 == 0
