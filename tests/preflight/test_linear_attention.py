"""What `mrl check` refuses of a model with linear attention, and what it turns off."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.planner.shape import read_shape
from mrl.preflight import check
from mrl.preflight.megatron import with_native_layers
from mrl.preflight.prefixes import describe_prefixes
from mrl.toy_model import build_tokenizer
from parallel.hf_config import HfModel
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.parallel.models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("linear") / "model"
    tokenizer = build_tokenizer()
    write_tiny(
        "qwen3_next", folder, vocab_size=128, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return Toy(folder)


@pytest.mark.parametrize(
    ("keys", "world", "text"),
    [
        ([], 1, r"'qwen3_next': on a CPU SGLang computes its gated delta nets only .* on GPUs"),
        (["parallel.context_parallel_size=2"], 2, r"context_parallel_size is 2, .* set it to 1"),
        (
            ["model.transformer_impl=transformer_engine"],
            1,
            r"needs mrl's own layers: Megatron's gated delta",
        ),
        (
            ["parallel.tensor_model_parallel_size=4"],
            4,
            r"2 key heads of linear attention .* size 4",
        ),
        (
            ["lora.rank=4"],
            1,
            r"lora.rollout=adapter: SGLang has no sizes .* set lora.rollout=merged",
        ),
    ],
    ids=["engine", "context", "engine's layers", "heads", "adapter"],
)
def test_what_is_refused(
    keys: list[str], world: int, text: str, model: Toy, tmp_path: Path
) -> None:
    recipe = load_recipe(TOY_RECIPE, model.overrides(tmp_path / "run", *keys))
    with pytest.raises(InputError, match=text) as caught:
        check(recipe, world)
    assert "\n" not in str(caught.value)


def test_only_own_layers_and_no_shared_prefixes(model: Toy, tmp_path: Path) -> None:
    keys = model.overrides(tmp_path, "train.share_prefixes=auto")
    recipe, found = load_recipe(TOY_RECIPE, keys), HfModel.read(model.model)
    assert recipe.model.transformer_impl == "auto"
    assert with_native_layers(recipe, found).model.transformer_impl == "local"
    shape = read_shape(found.config, found.architecture)
    text = describe_prefixes(recipe, [], shape, elsewhere=False)
    assert text.startswith("nowhere: the state of linear attention")
