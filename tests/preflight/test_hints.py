"""The hints of `mrl check`, and that the recipe may do what they say."""

from __future__ import annotations

import pytest

from mrl.config import load_recipe
from mrl.engines.sglang.arguments import check_server_args
from mrl.preflight import hints as module
from mrl.preflight.hints import FP32_HEAD, hints
from tests.loop.conftest import TOY_RECIPE


def hinted(*keys: str, on_gpu: bool = False) -> bool:
    """Whether the recipe gets the hint about the LM head."""
    found = hints(load_recipe(TOY_RECIPE, list(keys)), on_gpu=on_gpu)
    assert all("\n" not in hint and f"server_args={{{FP32_HEAD}: true}}" in hint for hint in found)
    return len(found) == 1


def test_an_engine_in_bf16_gets_a_hint_about_its_lm_head() -> None:
    half = "rollout.dtype=bfloat16"
    assert hinted(half)
    assert hinted("model.dtype=bfloat16")
    assert hinted("model.dtype=auto", on_gpu=True)
    assert not hinted("model.dtype=auto")
    assert not hinted("rollout.dtype=float32", "model.dtype=bfloat16")
    assert not hinted(half, "debug.load_rollouts=x")
    assert not hinted(half, "rollout.engine=my.engine")
    assert not hinted(half, "rollout.true_on_policy=true")
    for value in ("true", "false"):  # whoever wrote the key knows it
        assert not hinted(half, f"rollout.server_args={{{FP32_HEAD}: {value}}}")


def test_what_the_hint_says_is_allowed() -> None:
    recipe = load_recipe(TOY_RECIPE, [f"rollout.server_args={{{FP32_HEAD}: true}}"])
    check_server_args(recipe.rollout.server_args)


def test_a_release_without_the_argument_gets_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hinted("rollout.dtype=bfloat16")
    monkeypatch.setattr(module, "field_names", frozenset)
    assert not hinted("rollout.dtype=bfloat16")
