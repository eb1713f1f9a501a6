"""What `mrl check` says of a recipe that trains multi-token-prediction layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.planner.activations import mtp_rows
from mrl.planner.flops import model_flops, training_flops
from mrl.planner.report import model_table
from mrl.planner.shape import read_shape
from mrl.planner.stages import stages
from mrl.planner.units import count
from mrl.planner.workload import Workload
from mrl.preflight import check
from mrl.preflight.mtp import planned_mtp
from mrl.preflight.prefixes import describe_prefixes
from mrl.preflight.room import checkpoint_bytes
from mrl.toy_model import build_tokenizer
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.parallel.models import write_tiny
from tests.parallel.mtp_models import FILE, write_mtp

KEY = "train.mtp_loss_scaling_factor=0.2"


def write(model_type: str, folder: Path, *, has_mtp: bool) -> Toy:
    tokenizer = build_tokenizer()
    (write_mtp if has_mtp else write_tiny)(
        model_type, folder, vocab_size=128, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return Toy(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return write("glm4_moe", tmp_path_factory.mktemp("mtp") / "model", has_mtp=True)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["lora.rank=4"], "a LoRA adapter is trained, and MTP layers are never adapted"),
        (["train.logprob_chunk_tokens=0"], "logprob_chunk_tokens is 0: .* such as 1024"),
    ],
    ids=["adapter", "logits"],
)
def test_what_it_cannot_be_combined_with(
    keys: list[str], text: str, model: Toy, tmp_path: Path
) -> None:
    recipe = load_recipe(TOY_RECIPE, model.overrides(tmp_path / "run", KEY, *keys))
    with pytest.raises(InputError, match=f"mtp_loss_scaling_factor is 0.2, but .*{text}") as caught:
        check(recipe, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("qwen3_moe", "the qwen3_moe model .* has no multi-token-prediction layers in its config"),
        ("glm4_moe", "the glm4_moe model .* has no multi-token-prediction layers in its config"),
    ],
)
def test_a_model_without_such_layers(model_type: str, text: str, tmp_path: Path) -> None:
    toy = write(model_type, tmp_path / "model", has_mtp=False)
    recipe = load_recipe(TOY_RECIPE, toy.overrides(tmp_path / "run", KEY))
    with pytest.raises(InputError, match=text) as caught:
        check(recipe, 1)
    assert "\n" not in str(caught.value)


def test_an_architecture_whose_layers_it_does_not_train(tmp_path: Path) -> None:
    config = {"num_nextn_predict_layers": 1}  # as in the published config.json of DeepSeek-V3.2
    model = HfModel.read(write_tiny("deepseek_v32", tmp_path / "model", **config))
    recipe = load_recipe(TOY_RECIPE, Toy(model.path).overrides(tmp_path / "run", KEY))
    text = (
        f"does not train the multi-token-prediction layers of a deepseek_v32 model.*{model.path} as"
    )
    with pytest.raises(InputError, match=text) as caught:
        planned_mtp(recipe, model)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_has_the_weights_that_are_read(model: Toy, tmp_path: Path) -> None:
    """Those of MTP layers only if they are trained, and never the copies of embedding and output."""
    keys = [*model.overrides(tmp_path / "run"), "model.dtype=float32"]
    own = sum(t.numel() for t in load_file(model.model / "model.safetensors").values())
    mtp = load_file(model.model / FILE)
    layers = sum(
        t.numel() for n, t in mtp.items() if not n.endswith(("embed_tokens.weight", "head.weight"))
    )
    for more, expected in (([], own), ([KEY], own + layers)):
        assert checkpoint_bytes(check(load_recipe(TOY_RECIPE, [*keys, *more]), 1)) == 12 * expected


def test_weights_that_are_missing_or_of_another_head(tmp_path: Path) -> None:
    toy = write("glm4_moe", tmp_path / "model", has_mtp=True)
    recipe = load_recipe(TOY_RECIPE, toy.overrides(tmp_path / "run", KEY))
    tensors = load_file(toy.model / FILE)
    changed = tensors | {"model.layers.4.shared_head.head.weight": torch.ones(128, 32)}
    save_file(changed, toy.model / FILE)
    with pytest.raises(InputError, match=r"shared_head.head.weight of .* differs from lm_head"):
        check(recipe, 1)
    original = tensors["model.layers.4.shared_head.head.weight"]
    for rows, deep in ((slice(8, None), False), (5, True)):  # row 5 is not in the sample
        head = original.clone()
        head[rows] += 1
        save_file(tensors | {"model.layers.4.shared_head.head.weight": head}, toy.model / FILE)
        with pytest.raises(InputError, match=r"shared_head.head.weight of .* differs from lm_head"):
            check(recipe, 1, deep=deep)
    check(recipe, 1)
    del changed["model.layers.4.shared_head.head.weight"], changed["model.layers.4.hnorm.weight"]
    save_file(changed, toy.model / FILE)
    with pytest.raises(InputError, match=r"no tensor model.layers.4.hnorm.weight"):
        check(recipe, 1)
    (toy.model / FILE).unlink()
    with pytest.raises(
        InputError, match=r"in its weights \(no tensor model.layers.4.enorm.weight\)"
    ):
        check(recipe, 1)


def test_the_plan_counts_them(model: Toy, tmp_path: Path) -> None:
    keys = model.overrides(tmp_path / "run", "train.share_prefixes=auto")
    plain, trains = (check(load_recipe(TOY_RECIPE, [*keys, *more]), 1) for more in ([], [KEY]))
    assert "is not trained, and exported as it is" in dict(plain.rows())["model"]
    assert "1 multi-token-prediction layer(s), trained" in dict(trains.rows())["model"]
    off, on = (read_shape(p.model.config, p.model.architecture) for p in (plain, trains))
    assert describe_prefixes(trains.recipe, [], on, elsewhere=False).startswith(
        "nowhere: MTP layers"
    )
    hidden, vocab = 32, 128
    tensors = load_file(model.model / FILE)
    others = ("embed_tokens.weight", "head.weight", "e_score_correction_bias")
    kept = {name: t for name, t in tensors.items() if not name.endswith(others)}
    num = sum(t.numel() for t in kept.values())
    dims = ParallelDims(world=2, tp=1, pp=2, vpp=1, cp=1, ep=1, etp=1)
    (first, last), (same, more) = stages(off, dims), stages(on, dims)
    assert first == same
    assert more.num_trained - last.num_trained == num
    assert more.exported == last.exported  # engines get none
    assert model_flops(on, 8) == model_flops(off, 8)  # of a pass without gradients
    experts = sum(t.numel() for n, t in kept.items() if ".experts." in n)
    norms = sum(t.numel() for n, t in kept.items() if "norm" in n)
    active = num - norms - experts + experts * 2 // 8
    attention = 2 * 8 * 2 * 4 * 16  # 8 keys, 4 heads of 16
    more_flops = 3 * (2 * active + attention) + 2 * 2 * hidden * vocab
    assert training_flops(on, 8) - training_flops(off, 8) == pytest.approx(more_flops)
    work = Workload(8, 8, 8, 8, weight_bytes=4)
    shown, before = (dict(model_table(shape, work).rows) for shape in (on, off))
    assert shown.pop("MTP layers, beside them") == count(num)
    assert shown == before
    activations, copy = mtp_rows(on, more, dims, work, training=True)
    assert activations.num_bytes > 0
    assert copy.num_bytes == 4 * hidden * vocab
    assert mtp_rows(on, same, dims, work, training=True) == []
    assert mtp_rows(on, more, dims, work, training=False) == []
    assert json.loads((model.model / "config.json").read_text())["num_nextn_predict_layers"] == 1
