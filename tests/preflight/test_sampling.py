"""What a recipe says of the sampling: what is refused, and what an evaluation set takes over."""

from __future__ import annotations

import pytest
import torch

from mrl.config import EvalSetConfig, load_recipe
from mrl.errors import InputError
from mrl.preflight.sampling import check_cache, check_sampling, check_sampling_mask
from mrl.types import Prompt
from tests.loop.conftest import TOY_RECIPE

VOCAB_SIZE = 99


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["temperature=1e30"], ["rollout.temperature is 1e+30, expected 1e-06 to 1e+06"]),
        (["temperature=1e-7"], ["rollout.temperature is 1e-07, expected 1e-06 to 1e+06"]),
        (["top_k=0"], ["rollout.top_k: expected at least 1, or -1 for all, got 0"]),
        (["top_k=100"], ["rollout.top_k is 100", "has only 99 tokens"]),
        (["stop_token_ids=[99]"], ["rollout.stop_token_ids has 99, expected 0 to 98"]),
        (["stop=['']"], ["rollout.stop: got an empty text"]),
        (["stop=END", "max_response_len=8", "min_response_len=8"], ["one exact length"]),
        (["stop=END", "partial_rollouts=resume"], ["use stop_token_ids, or partial_rollouts="]),
    ],
)
def test_what_cannot_be_meant_is_refused(keys: list[str], parts: list[str]) -> None:
    keys = ["min_response_len=0", *keys]
    recipe = load_recipe(TOY_RECIPE, [f"rollout.{key}" for key in keys])
    with pytest.raises(InputError) as caught:
        check_sampling(recipe.rollout, VOCAB_SIZE)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_cache_that_is_too_small_for_a_request_is_refused() -> None:
    prompts = [Prompt("0", torch.arange(16), "", {}, "row 1")]

    def check(size: int | None, *keys: str) -> None:
        more = [] if size is None else [f"rollout.max_total_tokens={size}"]
        more += ["rollout.max_response_len=8", "rollout.min_response_len=0"]
        recipe = load_recipe(TOY_RECIPE, [*more, *keys])
        check_cache(recipe, prompts, 64, on_gpu=False)

    check(31)
    with pytest.raises(InputError, match=r"have 24 tokens.* cache of 30 .*holds 23 .*set it to 31"):
        check(30)
    check(None)
    episodes = ("reward=null", "environment.name=guess_letter")
    check(71, *episodes)
    with pytest.raises(InputError, match=r"a conversation has up to .* 64 tokens, .*set it to 71"):
        check(70, *episodes)
    with pytest.raises(InputError, match="holds 21 of one request; set it to 33"):
        check(30, "rollout.server_args.page_size=4")
    check(30, "debug.load_rollouts=x")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ([], ["rollout.top_k is -1", "needs 2 to 4096"]),
        (["rollout.top_k=1"], ["rollout.top_k is 1,"]),
        (["rollout.top_k=5000"], ["rollout.top_k is 5000", "2 to 4096"]),
        (
            ["rollout.top_k=20", "rollout.server_args={sampling_mask_max_tokens: 10}"],
            ["rollout.top_k is 20", "2 to 10"],
        ),
        (["rollout.top_k=20", "rollout.true_on_policy=true"], ["true_on_policy", "last bits"]),
        (["rollout.top_k=20", "train.logprob_chunk_tokens=0"], ["logprob_chunk_tokens is 0"]),
    ],
)
def test_what_does_not_go_with_a_sampling_mask_is_refused(
    keys: list[str], parts: list[str]
) -> None:
    recipe = load_recipe(TOY_RECIPE, ["rollout.sampling_mask=true", *keys])
    with pytest.raises(InputError) as caught:
        check_sampling_mask(recipe)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_sampling_mask_goes_with_top_k_and_top_p() -> None:
    check_sampling_mask(load_recipe(TOY_RECIPE, []))
    keys = ["rollout.sampling_mask=true", "rollout.top_k=20", "rollout.top_p=0.9"]
    check_sampling_mask(load_recipe(TOY_RECIPE, keys))
    no_number = "rollout.server_args={sampling_mask_max_tokens: many}"  # for the engine to refuse
    check_sampling_mask(load_recipe(TOY_RECIPE, [*keys, no_number]))


def test_one_text_is_a_list_of_one() -> None:
    recipe = load_recipe(TOY_RECIPE, ["rollout.min_response_len=0", "rollout.stop=</answer>"])
    assert recipe.rollout.stop == ("</answer>",)
    check_sampling(recipe.rollout, VOCAB_SIZE)
    assert EvalSetConfig.model_validate({"name": "a", "path": "b", "stop": "x"}).stop == ("x",)
