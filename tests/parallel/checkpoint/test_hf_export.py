"""Checkpoint -> Hugging Face folder: the policy's bits from any layout, transformers' own logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from moe.routes import Replay
from mrl.cli import main
from mrl.toy_model import build_tokenizer
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.hf_writer import write_safetensors
from tests.parallel.checkpoint.test_checkpoint_layouts import build
from tests.parallel.conftest import write_model
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import exported, join_mesh, loss, ready_batch
from tests.parallel.test_policy import packed
from tests.ranks import run_ranks

TEMPERATURE = 0.8  # of test_checkpoint_layouts.build


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a chat template."""
    path = write_model(tmp_path_factory.mktemp("base") / "toy-base", vocab_size=128)
    build_tokenizer(128).save_pretrained(path)
    return path


def saves(
    model_path: Path,
    sizes: dict[str, int],
    samples: list[Sample],
    root: Path,
    dtype: str,
    steps: int,
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)
    policy = build(model_path, mesh, dtype=dtype)
    for _ in range(steps):
        batch, _ = ready_batch(policy, mesh, samples)
        policy.train_step(batch, loss, Replay.rollout)
    Checkpoints(root / "checkpoints", mesh, keep=1).save(steps, policy, {})
    weights = exported(policy)
    folder = root / "live"
    if mesh.rank == 0:
        folder.mkdir()
    stream = (pair for bucket in policy.export(0, 4096) for pair in bucket.tensors)
    if mesh.rank == 0:
        write_safetensors(folder, stream, 1 << 15)
    else:
        list(stream)
    alone = mesh.dims.world == 1
    out = (
        policy.forward_only([packed(samples)], Replay.off).logprobs[0] if alone else torch.empty(0)
    )
    return {"weights": weights, "logprobs": out}


def save(
    model_path: Path, world: int, sizes: dict[str, int], root: Path, *, dtype: str = "float32",
    steps: int = 0,
) -> dict[str, Any]:  # fmt: skip
    arguments = (model_path, sizes, few_samples(), root, dtype, steps)
    return run_ranks(world, saves, *arguments, folder=root / "out")[0]


def read(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {f.name: load_file(f) for f in sorted(folder.glob("*.safetensors"))}
    assert set(index["weight_map"].values()) == files.keys()
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(map(len, files.values())) == len(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def test_transformers_reads_the_trained_policy(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    out = save(base, 1, {}, run, steps=2)
    target = tmp_path / "my-export"
    main(["export", str(run), str(target), "--max-shard-size-mb", "1"])
    assert "iter_0000002" in capsys.readouterr().out
    assert_equal(read(target), out["weights"])
    assert_equal(read(run / "live"), out["weights"])
    assert not torch.equal(
        out["weights"]["lm_head.weight"], load_file(base / "model.safetensors")["lm_head.weight"]
    )

    model = Qwen3MoeForCausalLM.from_pretrained(target)
    assert model.dtype == torch.float32
    start = 0
    for sample in few_samples():
        ids = sample.token_ids
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0] / TEMPERATURE
        theirs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        wanted = sample.loss_mask[1:]
        mine = out["logprobs"][start + 1 : start + len(ids)]
        assert (mine - theirs)[wanted].abs().max() < 1e-5
        start += len(ids)

    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(tokenizer.encode("2+2")) == "2+2"
    assert "<|im_start|>user" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    card = (target / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| training step | 2 |" in card
    assert len({file.stat().st_mode for file in target.iterdir()}) == 1  # as readable as the card
    assert str(tmp_path) not in card
    assert not list(tmp_path.glob(".*"))


def test_any_layout_gives_the_bits_of_the_model_folder(base: Path, tmp_path: Path) -> None:
    """Untrained: what goes in at TP2xPP2xEP2 comes out. The other tests have one process and PP2."""
    given, run, target = load_file(base / "model.safetensors"), tmp_path / "run", tmp_path / "hf"
    save(base, 4, {"tensor": 2, "pipeline": 2, "expert": 2}, run)
    main(["export", str(run / "checkpoints/iter_0000000"), str(target)])
    assert_equal(read(target), given)
    assert_equal(read(run / "live"), given)


def test_bf16_stays_bf16_and_tied_stays_tied(tmp_path: Path) -> None:
    base = write_model(tmp_path / "tied", tie_word_embeddings=True)
    run, target = tmp_path / "run", tmp_path / "hf"
    out = save(base, 2, {"pipeline": 2}, run, dtype="bfloat16", steps=1)
    main(["export", str(run), str(target)])
    assert_equal(read(target), out["weights"])
    assert "lm_head.weight" not in out["weights"]
    model = Qwen3MoeForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, out["weights"]["model.embed_tokens.weight"])


def test_files_are_bounded_and_names_come_once(tmp_path: Path) -> None:
    tensors = [(f"t{i}", torch.full((n,), float(i))) for i, n in enumerate([3, 3, 3, 100, 1])]
    write_safetensors(tmp_path, iter(tensors), max_bytes=24)
    files = {f.name: list(load_file(f)) for f in sorted(tmp_path.glob("*.safetensors"))}
    assert files == {
        "model-00001-of-00004.safetensors": ["t0", "t1"],
        "model-00002-of-00004.safetensors": ["t2"],
        "model-00003-of-00004.safetensors": ["t3"],
        "model-00004-of-00004.safetensors": ["t4"],
    }
    assert all(torch.equal(read(tmp_path)[name], tensor) for name, tensor in tensors)
    with pytest.raises(ValueError, match="t0 comes twice"):
        write_safetensors(tmp_path, iter(tensors + tensors), max_bytes=24)


def test_what_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    moved = write_model(tmp_path / "moved", vocab_size=128)
    save(moved, 1, {}, run)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")

    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["export", *arguments])
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "is not an empty folder" in refusal(str(run), str(full))
    assert "has no checkpoint" in refusal(str(full), str(tmp_path / "new"))
    assert "at least 1" in refusal(str(run), str(tmp_path / "new"), "--max-shard-size-mb", "0")
    moved.rename(tmp_path / "gone")
    assert "--model PATH" in refusal(str(run), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    main(["export", str(run), str(tmp_path / "new"), "--model", str(base)])
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    data = run / "checkpoints/iter_0000000/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    for source in (run, data.parent):
        assert "__0_0.distcp has" in refusal(str(source), str(tmp_path / "newer"))
    assert not (tmp_path / "newer").exists()


@pytest.mark.release
def test_it_needs_no_megatron() -> None:
    code = (
        "import sys, mrl.commands.export_checkpoint; "
        "print([m for m in sys.modules if m.startswith('megatron')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
