"""A dense model made into a MoE computes the same, and what cannot be upcycled is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.cli import main
from mrl.errors import InputError
from parallel.checkpoint.hf_writer import new_folder
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors
from parallel.upcycle import Upcycling, largest_difference, upcycle
from tests.parallel.models import LLAMA3, write_tiny

TIED = {"tie_word_embeddings": True}
HALF = Upcycling(8, 4, 2)


@pytest.mark.parametrize(
    ("dense", "changes", "how", "expected"),
    [
        ("llama", TIED, Upcycling(4, 2), "mixtral"),
        ("llama", {}, Upcycling(9, 6, 3), "mixtral"),
        (
            "llama",
            {"rope_parameters": LLAMA3},
            Upcycling(8, 4, 2, like="qwen2_moe"),
            "qwen2_moe",
        ),
        ("qwen2", TIED, Upcycling(4, 1, 1, seed=3), None),
        ("qwen2", {}, HALF, "qwen2_moe"),
        ("qwen3", TIED, HALF, "qwen3_moe"),
    ],
)
def test_the_moe_computes_what_the_dense_model_computes(
    dense: str, changes: dict[str, Any], how: Upcycling, expected: str | None, tmp_path: Path
) -> None:
    source, target = write_tiny(dense, tmp_path / "dense", **changes), tmp_path / "moe"
    if expected is None:  # renormalised weights of one expert give the router no gradient
        with pytest.raises(InputError, match="gives the router no gradient"):
            upcycle(source, target, how)
        assert not target.exists()
        return
    moe = upcycle(source, target, how)
    assert moe.architecture.model_type == expected
    assert moe.moe_layer_numbers == (1, 2, 3, 4)
    assert (moe.sizes.num_experts, moe.config["num_experts_per_tok"]) == (how.num_experts, how.topk)
    assert moe.sizes.moe_ffn_size == 48 // how.granularity
    assert largest_difference(source, target) < 1e-5
    with HfTensors(moe) as tensors:
        routers = [tensors[name] for name in sorted(tensors.names) if name.endswith(".gate.weight")]
        for router in routers:
            groups = router.unflatten(0, (-1, how.granularity))
            assert torch.equal(groups, groups[:, :1].expand_as(groups))
            assert len(groups[:, 0].unique(dim=0)) == how.num_experts // how.granularity
        assert len({tuple(router.flatten().tolist()) for router in routers}) == 4


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with HfTensors(HfModel.read(folder)) as tensors:
        return {name: tensors[name] for name in tensors.names}


def test_noise_and_seed(tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "dense")
    folders = {name: tmp_path / name for name in ("plain", "again", "other", "noisy")}
    plain = Upcycling(4, 2)
    for name, how in (
        ("plain", plain),
        ("again", plain),
        ("other", replace(plain, seed=1)),
        ("noisy", replace(plain, noise=0.1)),
    ):
        upcycle(source, folders[name], how)
    first, again, other, noisy = (weights_of(folders[name]) for name in folders)
    assert all(torch.equal(first[name], again[name]) for name in first)
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    assert changed == {name for name in first if name.endswith("gate.weight")}
    experts = [f"model.layers.2.block_sparse_moe.experts.{e}.w2.weight" for e in range(4)]
    assert len({tuple(noisy[name].flatten().tolist()) for name in experts}) == 4
    spread = (noisy[experts[0]] - first[experts[0]]).std() / first[experts[0]].std()
    assert 0.08 < spread < 0.12
    assert largest_difference(source, folders["noisy"]) > 1e-4


def test_bf16_and_several_files(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    fp32 = write_tiny("qwen3", tmp_path / "fp32", **TIED)
    source, target = tmp_path / "dense", tmp_path / "moe"
    AutoModelForCausalLM.from_pretrained(fp32, dtype=torch.bfloat16).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    moe = upcycle(source, target, HALF, max_bytes=20_000)
    assert len(list(target.glob("*.safetensors"))) > 3
    assert {tensor.dtype for tensor in weights_of(target).values()} == {torch.bfloat16}
    assert moe.config.get("dtype", moe.config.get("torch_dtype")) == "bfloat16"
    assert largest_difference(source, target) < 1e-5  # 2 and 1/2 are exact in bf16
    assert (target / "tokenizer.json").read_text() == "{}"
    with pytest.raises(InputError, match="3 times a weight is not exact in BF16"):
        upcycle(source, tmp_path / "third", Upcycling(6, 3, 3))
    record = json.loads((target / "mrl_upcycle.json").read_text())
    assert record["source"] == "dense"
    assert (record["num_experts"], record["topk"], record["granularity"]) == (8, 4, 2)


@pytest.mark.parametrize(
    ("dense", "changes", "how", "message"),
    [
        ("qwen3_moe", {}, HALF, "is a MoE already"),
        ("llama", {"rope_parameters": LLAMA3}, HALF, "mixtral ignores; give --like qwen2_moe"),
        ("llama", {"head_dim": 16}, HALF, "head_dim 16 times 4 heads is not the hidden size 32"),
        ("llama", {}, replace(HALF, like="qwen3_moe"), "expected mixtral or qwen2_moe"),
        ("qwen2", {}, replace(HALF, like="mixtral"), "expected qwen2_moe"),
        ("llama", {}, Upcycling(4, 8), "--top-k 8 is above --experts 4"),
        ("llama", {}, Upcycling(0, 0), "--experts 0: expected at least 1"),
        ("llama", {}, Upcycling(9, 4, 2), "does not divide --experts 9"),
        ("llama", {}, Upcycling(8, 3, 2), "does not divide --top-k 3"),
        ("llama", {}, Upcycling(10, 5, 5), "does not divide the MLP's width 48"),
        ("llama", {}, Upcycling(4, 2, noise=-1.0), "--noise -1.0: expected a finite number"),
        ("llama", {}, Upcycling(4, 2, noise=float("nan")), "--noise nan"),
        (
            "llama",
            {},
            Upcycling(4, 2, seed=1 << 62),
            "--seed 4611686018427387904: expected at least 0",
        ),
        ("llama", {}, Upcycling(4, 2, seed=-1), "--seed -1"),
        ("llama", {}, Upcycling(70_000, 2), "--experts 70000: expected at most 65536"),
        ("llama", {}, Upcycling(4, 2, like=""), "--like '': its attention"),
        (
            "llama",
            {"initializer_range": 0.0},
            HALF,
            "initializer_range is 0.0, expected a positive",
        ),
    ],
)
def test_what_cannot_be_upcycled(
    dense: str, changes: dict[str, object], how: Upcycling, message: str, tmp_path: Path
) -> None:
    source = write_tiny(dense, tmp_path / "dense", **changes)
    with pytest.raises(InputError, match=message):
        upcycle(source, tmp_path / "moe", how)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def change_config(folder: Path, **changes: object) -> None:
    """Write `changes` into config.json; None removes the key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_keys_that_the_dense_model_may_leave_out(tmp_path: Path) -> None:
    """Mixtral's default for num_key_value_heads is 8, and Llama's is the number of heads."""
    source = write_tiny("llama", tmp_path / "dense", num_key_value_heads=4)
    change_config(source, num_key_value_heads=None, initializer_range=None)
    moe = upcycle(source, tmp_path / "moe", HALF)
    assert (moe.config["num_key_value_heads"], moe.config["initializer_range"]) == (4, 0.02)
    assert largest_difference(source, tmp_path / "moe") < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"initializer_range": 1e39},
            "initializer_range is 1e.39, expected a positive number of at most",
        ),
        ({"initializer_range": 10**400}, "initializer_range is 1000.*, expected a positive"),
        (
            {"num_hidden_layers": 3},
            "weight.s. that a llama model with this config.json does not have",
        ),
        ({"num_hidden_layers": 5}, "no weights of layer 4"),
        ({"intermediate_size": 24}, "mlp"),
        ({"vocab_size": 7}, "vocab_size x hidden_size 7"),
    ],
)
def test_weights_of_another_config_are_not_upcycled(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    source = write_tiny("llama", tmp_path / "dense")
    change_config(source, **changes)
    with pytest.raises(InputError, match=message):
        upcycle(source, tmp_path / "moe", HALF)
    assert not (tmp_path / "moe").exists()


def test_weights_that_are_not_finite_are_not_upcycled(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = write_tiny("llama", tmp_path / "dense")
    weights = weights_of(source)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name].view(-1)[999] = torch.nan
    for file in source.glob("*.safetensors"):
        file.unlink()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{name} holds nan"):
        upcycle(source, tmp_path / "moe", replace(HALF, noise=0.1))


def test_noise_that_overflows_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write_tiny("llama", tmp_path / "dense"), tmp_path / "moe"
    words = ["--experts", "4", "--top-k", "2", "--noise", "1e39"]
    with pytest.raises(SystemExit):
        main(["upcycle", str(source), str(target), *words])
    assert "log-probs that are not finite" in capsys.readouterr().err


def test_two_commands_do_not_write_one_folder(tmp_path: Path) -> None:
    source, target = write_tiny("llama", tmp_path / "dense"), tmp_path / "moe"
    with new_folder(target) as partial:
        (partial / "mine").touch()
        with pytest.raises(InputError, match="another process is writing"):
            upcycle(source, target, HALF)
    assert (target / "mine").exists()
    killed = tmp_path / ".other.partial"
    killed.mkdir()
    (killed / "left").touch()
    upcycle(source, tmp_path / "other", HALF)
    assert not killed.exists()
    assert not (tmp_path / "other" / "left").exists()


def test_a_command_that_begins_as_another_ends_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, hidden, rename = tmp_path / "moe", tmp_path / ".moe.partial", Path.rename

    def rename_as_another_begins(self: Path, to: Path) -> Path:
        found = rename(self, to)
        hidden.mkdir()
        return found

    monkeypatch.setattr(Path, "rename", rename_as_another_begins)
    with new_folder(target) as partial:
        (partial / "mine").touch()
    assert hidden.exists()


def test_a_folder_that_another_command_has_just_made_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, mkdir = tmp_path / "moe", Path.mkdir

    def mkdir_as_another_ends(self: Path, *words: Any, **options: Any) -> None:
        if self.name == ".moe.partial":
            mkdir(target)
            (target / "theirs").touch()
        mkdir(self, *words, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir_as_another_ends)
    begun = []
    with (
        pytest.raises(InputError, match="moe is not an empty folder"),
        new_folder(target) as partial,
    ):
        begun.append(partial)
    assert not begun
    assert [child.name for child in tmp_path.iterdir()] == ["moe"]


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dear").touch()
    (tmp_path / ".moe.partial").symlink_to(tmp_path / "home")
    with (
        pytest.raises(InputError, match="moe cannot be made: Not a directory"),
        new_folder(tmp_path / "moe"),
    ):
        pass
    assert (tmp_path / "home" / "dear").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_tiny("llama", tmp_path / "dense"), tmp_path / "moe"
    words = ["upcycle", str(source), str(target), "--experts", "4", "--top-k", "2"]
    main(words)
    printed = capsys.readouterr().out
    assert f"wrote mixtral, 4 experts in 4 of 4 layers to {target}: 2 experts per token" in printed
    assert "log-probs of 64 random tokens differ by" in printed
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert f"{target} is not an empty folder" in capsys.readouterr().err
