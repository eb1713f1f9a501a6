"""PEFT on transformers reads what mrl writes and computes the same, and the other way round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe.routes import Replay
from mrl.config.adapter import Adapter, Experts
from mrl.types import LossOutput, MicroBatch, Sample, TrainBatch
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import PeftFolder
from parallel.lora.weights import LoraSetup
from tests.parallel.layouts import build, exported, join_mesh
from tests.parallel.lora.exchange import ALPHA, RANK, make_adapter, write_adapter
from tests.parallel.models import write_tiny
from tests.parallel.test_policy import TEMPERATURE, packed
from tests.ranks import run_ranks

FOLDER = Path(sys.prefix) / "peft"
TOLERANCE = 1e-5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

pytestmark = pytest.mark.release


def by_peft(work: Path, samples: list[Sample], **given: Any) -> dict[str, Any]:
    """Run `peft_side` beside this process."""
    if not FOLDER.is_dir():
        pytest.skip(f"no PEFT in {FOLDER}: `make test-all` installs it there")
    work.mkdir()
    pairs = [(sample.token_ids, sample.loss_mask) for sample in samples]
    torch.save({"samples": pairs, "temperature": TEMPERATURE, **given}, work / "in.pt")
    command = [sys.executable, "-m", "tests.parallel.lora.peft_side", str(FOLDER)]
    done = subprocess.run(
        [*command, str(work / "in.pt"), str(work / "out.pt")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(work / "out.pt", weights_only=True)


def negative_sum(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
    return LossOutput(-(logprobs * batch.loss_mask).sum())


def by_policy(path: Path, adapter: Adapter, folder: Path, samples: list[Sample]) -> dict[str, Any]:
    """Log-probs of each sample's tokens but the first, gradients by PEFT's names, and the adapter."""
    policy = build(path, join_mesh(path, {}), lora=LoraSetup(adapter, path=folder))
    loaded = exported(policy)
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        for entry in policy.trained.entries:
            (name,) = entry.hf_names()
            gradients[name] = getattr(entry.parameter, "main_grad").clone()  # noqa: B009

    batch = packed(samples)
    count = sum(int(sample.loss_mask.sum()) for sample in samples)
    step = TrainBatch([batch], count, len(samples))
    found = policy.train_step(step, negative_sum, Replay.off, keep).output.logprobs[0].detach()
    parts = found[: sum(len(s.token_ids) for s in samples)].split(
        [len(s.token_ids) for s in samples]
    )
    logprobs = [part[1:].clone() for part in parts]
    return {"logprobs": logprobs, "gradients": gradients, "adapter": loaded}


def assert_logprobs(ours: list[Tensor], theirs: list[Tensor], samples: list[Sample]) -> None:
    for a, b, sample in zip(ours, theirs, samples, strict=True):
        wanted = sample.loss_mask[1:]
        assert wanted.any()
        assert (a - b)[wanted].abs().max() < TOLERANCE


def unfused(gradients: dict[str, Tensor], num_experts: int, model_type: str) -> dict[str, Tensor]:
    """PEFT's gradients by the names of mrl's files: the experts are taken apart."""
    found = {}
    for peft_name, tensor in gradients.items():
        name = peft_name.replace(".default.", ".")
        if ".experts." not in name:
            found[name] = tensor
            continue
        base = name.partition(".experts.")[0] + ".experts"
        parts = ("gate_proj", "up_proj") if "base_layer" in name else ("down_proj",)
        if model_type == "mixtral":
            base = base.replace(".mlp.", ".block_sparse_moe.")
            parts = ("w1", "w3") if "base_layer" in name else ("w2",)
        matrix = "A" if "lora_A" in name else "B"
        rank = len(parts) * RANK
        for expert in range(num_experts):
            if matrix == "A":
                own = tensor.view(num_experts, rank, -1)[expert]
            else:
                own = tensor.view(-1, rank, num_experts)[:, :, expert]
            for number, part in enumerate(parts):
                piece = own.chunk(len(parts))[number]
                if matrix == "B":
                    piece = piece[:, number * RANK : (number + 1) * RANK]
                found[f"{base}.{expert}.{part}.lora_{matrix}.weight"] = piece
    return found


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "deepseek_v3", "deepseek_v32", "mixtral", "olmoe", "glm4_moe"]
)
@pytest.mark.parametrize("experts", ["none", "per_expert", "shared_outer"])
def test_peft_computes_the_same_from_our_folder(
    experts: Experts, model_type: str, samples: list[Sample], tmp_path: Path
) -> None:
    path = write_tiny(model_type, tmp_path / "model")
    model = HfModel.read(path)
    adapter = make_adapter(model, experts)
    write_adapter(tmp_path / "adapter", model, adapter)
    theirs = by_peft(tmp_path / "peft", samples, base=str(path), folder=str(tmp_path / "adapter"))
    args = (path, adapter, tmp_path / "adapter", samples)
    ours = run_ranks(1, by_policy, *args, folder=tmp_path / "out")[0]
    assert_logprobs(ours["logprobs"], theirs["logprobs"], samples)
    gradients = unfused(theirs["gradients"], model.sizes.num_experts, model_type)
    if experts == "shared_outer":  # PEFT has one for each expert: their sum is ours
        for name in ours["gradients"]:
            if name not in gradients:
                head, _, tail = name.partition(".experts.")
                every = [f"{head}.experts.{e}.{tail}" for e in range(model.sizes.num_experts)]
                gradients[name] = torch.stack([gradients.pop(one) for one in every]).sum(0)
    assert ours["gradients"].keys() == gradients.keys()
    for name, own in ours["gradients"].items():
        assert (own - gradients[name]).norm() <= TOLERANCE * gradients[name].norm(), name
    assert sum(bool(own.any()) for own in gradients.values()) > 0.9 * len(gradients)


@pytest.mark.parametrize("experts", ["none", "per_expert"])
def test_an_adapter_that_peft_trained_is_read_bit_for_bit(
    experts: Experts, samples: list[Sample], tmp_path: Path
) -> None:
    path = write_tiny("qwen3_moe", tmp_path / "model")
    saved = tmp_path / "trained"
    config: dict[str, Any] = {"r": RANK, "lora_alpha": int(ALPHA), "target_modules": ATTENTION}
    if experts == "per_expert":
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    given = {"base": str(path), "config": config, "steps": 2, "save": str(saved)}
    theirs = by_peft(tmp_path / "peft", samples, **given)
    adapter = make_adapter(HfModel.read(path), experts)
    args = (path, adapter, saved, samples)
    ours = run_ranks(1, by_policy, *args, folder=tmp_path / "out")[0]
    assert_logprobs(ours["logprobs"], theirs["logprobs"], samples)
    in_file = load_file(saved / "adapter_model.safetensors")
    for name, tensor in ours["adapter"].items():
        if ".experts." not in name:
            assert torch.equal(tensor, in_file[name]), name
            assert tensor.any(), name
            continue
        base, _, tail = name.partition(".experts.")
        expert, module, matrix, _ = tail.split(".")
        inner = "" if module == "down_proj" else ".base_layer"
        whole = in_file[f"{base}.experts{inner}.{matrix}.weight"]
        if matrix == "lora_A":  # gate and up projection begin with the one that PEFT gave both
            own = whole.view(4, RANK, -1)[int(expert)]
        else:
            own = whole.view(-1, RANK, 4)[:, :, int(expert)]
            own = own if module == "down_proj" else own.chunk(2)[module == "up_proj"]
        assert torch.equal(tensor, own), name


def test_what_peft_saves_again_is_ours(samples: list[Sample], tmp_path: Path) -> None:
    """PEFT reads our experts into its own form, with twice the rank, and we read that to the bit."""
    path = write_tiny("qwen3_moe", tmp_path / "model")
    model = HfModel.read(path)
    adapter = make_adapter(model, "per_expert")
    tensors = write_adapter(tmp_path / "adapter", model, adapter)
    given = {"base": str(path), "folder": str(tmp_path / "adapter")}
    by_peft(tmp_path / "peft", samples, **given, save_again=str(tmp_path / "again"))
    again = dict(PeftFolder(tmp_path / "again", adapter, model))
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
