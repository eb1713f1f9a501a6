"""What `mrl check` says of DeepSeek-V3.2, in one line each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight import check
from mrl.preflight.room import checkpoint_bytes
from mrl.toy_model import build_tokenizer
from parallel.hf_config import HfModel
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.parallel.models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("sparse") / "model"
    tokenizer = build_tokenizer()
    write_tiny(
        "deepseek_v32", folder, vocab_size=128, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return Toy(folder)


def test_a_checkpoint_has_no_optimizer_state_of_indexers(model: Toy, tmp_path: Path) -> None:
    recipe = load_recipe(TOY_RECIPE, model.overrides(tmp_path / "run", "model.dtype=float32"))
    tensors = load_file(model.model / "model.safetensors")
    indexers = sum(t.numel() for n, t in tensors.items() if ".indexer." in n)
    total = sum(t.numel() for t in tensors.values())
    plan: Any = SimpleNamespace(
        recipe=recipe, adapter=None, model=HfModel.read(model.model), critic=None
    )
    assert checkpoint_bytes(plan) == 12 * total - 8 * indexers


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            [],
            r"model 'deepseek_v32': SGLang's indexer of sparse attention runs on CUDA, HIP and NPU",
        ),
        (
            ["model.transformer_impl=transformer_engine"],
            r"needs mrl's own layers: Megatron's sparse attention refuses packed sequences",
        ),
        (
            ["lora.targets=[wk]"],
            r"got 'wk': the indexer stays that of the base: it is never trained",
        ),
    ],
    ids=["engine", "engine's layers", "adapter"],
)
def test_what_is_refused(keys: list[str], text: str, model: Toy, tmp_path: Path) -> None:
    recipe = load_recipe(TOY_RECIPE, model.overrides(tmp_path / "run", *keys))
    with pytest.raises(InputError, match=text) as caught:
        check(recipe, 1)
    assert "\n" not in str(caught.value)
