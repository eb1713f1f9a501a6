"""Checkpoints of an adapter: loaded at other layouts, refused for other models, and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe.routes import Replay
from mrl.cli import main
from mrl.config.adapter import Adapter, Experts
from mrl.errors import InputError
from mrl.preflight.resume import check_adapter
from mrl.run.folder import RunFolder
from mrl.toy_model import build_tokenizer
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.export import export_buckets
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import PeftFolder
from parallel.lora.weights import LoraSetup
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.checkpoint.test_hf_export import read
from tests.parallel.conftest import write_model
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import build, drained, exported, join_mesh, loss, ready_batch
from tests.parallel.lora.exchange import assert_same, make_adapter
from tests.ranks import run_ranks
from tests.release import release

EIGHT = {"tensor": 2, "pipeline": 2, "expert": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("base") / "toy-base", vocab_size=128)
    build_tokenizer(128).save_pretrained(path)
    return path


def adapted(
    path: Path, mesh: Mesh, experts: Experts, dtype: str = "float32", path_in: Path | None = None
) -> Policy:
    adapter = make_adapter(HfModel.read(path), experts)
    return build(path, mesh, dtype=dtype, lora=LoraSetup(adapter, path=path_in))


def one_step(policy: Policy, mesh: Mesh, samples: list[Sample]) -> dict[str, Tensor]:
    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, Replay.rollout)
    return exported(policy)


def saves(
    path: Path,
    sizes: dict[str, int],
    experts: Experts,
    dtype: str,
    root: Path,
    samples: list[Sample],
) -> dict[str, Any]:
    """Train two steps, save, and train a third one."""
    mesh = join_mesh(path, sizes)
    policy = adapted(path, mesh, experts, dtype)
    for _ in range(2):
        saved = one_step(policy, mesh, samples)
    Checkpoints(root / "checkpoints", mesh, keep=1).save(2, policy, {})
    merged = drained(export_buckets(policy.weights, 0, 4096, merged=True))
    return {"saved": saved, "merged": merged, "next": one_step(policy, mesh, samples)}


def loads(
    path: Path,
    sizes: dict[str, int],
    experts: Experts,
    dtype: str,
    root: Path,
    samples: list[Sample],
) -> dict[str, Any]:
    mesh = join_mesh(path, sizes)
    policy = adapted(path, mesh, experts, dtype)
    Checkpoints(root / "checkpoints", mesh, keep=1).load_newest(policy)
    loaded = exported(policy)
    return {"saved": loaded, "next": one_step(policy, mesh, samples)}


def save(
    path: Path, root: Path, experts: Experts, world: int = 1, dtype: str = "float32"
) -> dict[str, Any]:
    args = (path, EIGHT if world == 8 else {}, experts, dtype, root, few_samples())
    return run_ranks(world, saves, *args, folder=root / "out")[0]


Saved = Callable[[Experts, str], tuple[Path, dict[str, Any]]]
"""Returns the folder of a run of one process, and what it returned; each is trained once."""


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def of(experts: Experts, dtype: str) -> tuple[Path, dict[str, Any]]:
        root = tmp_path_factory.mktemp("saved")
        return root, save(base, root, experts, dtype=dtype)

    return of


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [("shared_outer", "float32"), release("per_expert", "bfloat16"), release("none", "float32")],
)
def test_a_resumed_run_has_the_bits_of_one_that_goes_on(
    experts: Experts, dtype: str, base: Path, saved: Saved, tmp_path: Path
) -> None:
    root, out = saved(experts, dtype)
    args = (base, {}, experts, dtype, root, few_samples())
    again = run_ranks(1, loads, *args, folder=tmp_path / "again")[0]
    assert_same(again["saved"], out["saved"])
    assert_same(again["next"], out["next"])
    moved = [not torch.equal(out["next"][name], own) for name, own in out["saved"].items()]
    assert all(moved)


@pytest.mark.release
@pytest.mark.parametrize("experts", ["shared_outer", "per_expert"])
def test_a_checkpoint_loads_at_another_layout(experts: Experts, base: Path, tmp_path: Path) -> None:
    out = save(base, tmp_path, experts, world=8)
    for world, sizes in ((1, {}), (4, {"tensor": 2, "expert": 2, "expert_tensor": 2})):
        args = (base, sizes, experts, "float32", tmp_path, few_samples())
        again = run_ranks(world, loads, *args, folder=tmp_path / f"again{world}")[0]
        assert_same(again["saved"], out["saved"])
        for name, own in again["next"].items():
            assert (own - out["next"][name]).norm() <= 1e-5 * out["next"][name].norm(), name


def test_a_checkpoint_holds_the_adapter_and_its_optimizer_alone(saved: Saved) -> None:
    root, _ = saved("shared_outer", "float32")
    names = list(SavedTensors(root / "checkpoints/iter_0000002"))
    kinds = {name.partition(".")[0] for name in names}
    assert kinds == {"model", "exp_avg", "exp_avg_sq", "random"}
    parameters = {name.partition(".")[2] for name in names if not name.startswith("random")}
    assert all(".lora." in name or ".shared_outer." in name for name in parameters)


def test_the_exported_adapter_is_that_of_the_policy(
    base: Path, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it is loaded by lora.path, and exported again, without a bit that changes."""
    root, out = saved("shared_outer", "float32")
    main(["export", str(root), str(tmp_path / "adapter")])
    assert "wrote the adapter after 2 steps" in capsys.readouterr().out
    adapter = make_adapter(HfModel.read(base), "shared_outer")
    found = PeftFolder(tmp_path / "adapter", adapter, HfModel.read(base))
    assert_same(dict(found), out["saved"])
    card = (tmp_path / "adapter/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\ntags:\n- mixture-of-experts\n")
    for row in ("| base model | toy-base |", "| rank | 3 |", "| alpha | 6 |",
                "| adapted modules | q_proj, k_proj, v_proj, o_proj |",
                "| adapted experts | shared_outer |"):  # fmt: skip
        assert row in card
    files = {file.name: file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert len(set(files.values())) == 1
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)

    args = (base, tmp_path / "adapter", tmp_path / "second")
    run_ranks(1, begins_with, *args, folder=tmp_path / "out")
    main(["export", str(tmp_path / "second"), str(tmp_path / "again")])
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        first, again = (tmp_path / one / name for one in ("adapter", "again"))
        assert first.read_bytes() == again.read_bytes()


def begins_with(path: Path, folder: Path, root: Path) -> None:
    mesh = join_mesh(path, {})
    policy = adapted(path, mesh, "shared_outer", path_in=folder)
    root.mkdir(exist_ok=True)
    Checkpoints(root / "checkpoints", mesh, keep=1).save(0, policy, {})


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [("shared_outer", "float32"), release("per_expert", "bfloat16"), release("none", "float32")],
)
def test_a_merged_export_has_the_bits_that_an_engine_is_sent(
    experts: Experts,
    dtype: str,
    base: Path,
    saved: Saved,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, out = saved(experts, dtype)
    main(["export", str(root), str(tmp_path / "merged"), "--merged"])
    assert "wrote the base with the adapter merged after 2" in capsys.readouterr().out
    found = read(tmp_path / "merged")
    assert_same(found, out["merged"])
    given = load_file(base / "model.safetensors")
    changed = {name for name, own in found.items() if not own.equal(given[name].to(own.dtype))}
    assert {name.split(".")[-2] for name in changed} >= {"q_proj", "o_proj"}
    assert ("experts" in "".join(changed)) == (experts != "none")
    assert (tmp_path / "merged/tokenizer.json").is_file()
    card = (tmp_path / "merged/README.md").read_text()
    assert "library_name: transformers" in card
    assert "toy-base with a LoRA adapter merged into its weights" in card


@pytest.mark.release
def test_an_adapter_of_eight_ranks_is_exported_like_that_of_one(base: Path, tmp_path: Path) -> None:
    out = save(base, tmp_path / "run", "per_expert", world=8)
    main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--model", str(base)])
    adapter = make_adapter(HfModel.read(base), "per_expert")
    found = PeftFolder(tmp_path / "adapter", adapter, HfModel.read(base))
    assert_same(dict(found), out["saved"])


def test_only_its_own_base_is_merged_with_an_adapter(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = saved("shared_outer", "float32")
    other = write_model(tmp_path / "other", vocab_size=128, rms_norm_eps=1e-3)
    arguments = ["export", str(root), str(tmp_path / "merged"), "--merged"]
    with pytest.raises(SystemExit) as error:
        main([*arguments, "--model", str(other)])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert f"{other} is not the base of the adapter: layernorm_epsilon 0.001 there" in message
    assert not (tmp_path / "merged").exists()


def refusals(path: Path, root: Path) -> dict[str, str]:
    """What loading the checkpoint of one kind says to each other kind."""
    mesh = join_mesh(path, {})
    hf = HfModel.read(path)

    def of(adapter: Adapter) -> Policy:
        return build(path, mesh, lora=LoraSetup(adapter))

    kinds: dict[str, Any] = {
        "full": lambda: build(path, mesh),
        "adapter": lambda: of(make_adapter(hf, "none")),
        "experts": lambda: of(make_adapter(hf, "per_expert")),
        "rank": lambda: of(make_adapter(hf, "none", rank=4)),
    }
    for name in ("full", "adapter"):
        Checkpoints(root / name, mesh, keep=1).save(1, kinds[name](), {})
    messages = {}
    for there in ("full", "adapter"):
        for here, make in kinds.items():
            try:
                Checkpoints(root / there, mesh, keep=1).load_newest(make())
                messages[f"{there} {here}"] = "loaded"
            except InputError as error:
                messages[f"{there} {here}"] = str(error)
    return messages


GIVE = "give the `lora` branch that it was trained with, or another output_dir"
EXPECTED = {
    "full full": "loaded",
    "full adapter": "full/iter_0000001 holds all weights of the model, and this run trains a LoRA "
    "adapter; leave `lora` out, or give another output_dir",
    "adapter full": "adapter/iter_0000001 holds a LoRA adapter of rank 3 alone, and this run trains "
    f"all weights; {GIVE}",
    "adapter adapter": "loaded",
    "adapter experts": "adapter/iter_0000001 holds another LoRA adapter: experts none there, "
    f"per_expert here, expert_modules none there, gate_proj up_proj down_proj here; {GIVE}",
    "adapter rank": "adapter/iter_0000001 holds another LoRA adapter: rank 3 there, 4 here; "
    + GIVE,
}


def test_checkpoints_of_another_kind_are_refused(base: Path, tmp_path: Path) -> None:
    messages = run_ranks(1, refusals, base, tmp_path, folder=tmp_path / "out")[0]
    for case, expected in EXPECTED.items():
        start = "" if expected == "loaded" else f"checkpoint {tmp_path}/"
        assert messages[case] == start + expected, case


def test_they_are_refused_before_the_start_too(base: Path, saved: Saved, tmp_path: Path) -> None:
    root, _ = saved("shared_outer", "float32")
    adapter = make_adapter(HfModel.read(base), "shared_outer")
    folder = RunFolder(root)
    check_adapter(folder, adapter)
    with pytest.raises(InputError, match="iter_0000002 holds a LoRA adapter of rank 3 alone, and"):
        check_adapter(folder, None)
    other = make_adapter(HfModel.read(base), "shared_outer", rank=4)
    with pytest.raises(InputError, match="another LoRA adapter: rank 3 there, 4 here; give"):
        check_adapter(folder, other)
    check_adapter(RunFolder(tmp_path / "new"), None)


def test_there_is_nothing_to_merge_without_an_adapter(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, save_full, base, tmp_path / "run", folder=tmp_path / "out")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--merged"])
    assert "holds all weights, and no adapter to merge; leave it out" in capsys.readouterr().err


def save_full(path: Path, root: Path) -> None:
    mesh = join_mesh(path, {})
    root.mkdir(exist_ok=True)
    Checkpoints(root / "checkpoints", mesh, keep=1).save(1, build(path, mesh), {})
