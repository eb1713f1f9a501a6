"""Multi-token-prediction layers of a model folder: not trained, and exported as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.cli import main
from parallel.checkpoint import hf_export
from parallel.checkpoint.checkpoints import Checkpoints
from tests.parallel.layouts import build, join_mesh
from tests.parallel.models import write_tiny
from tests.ranks import run_ranks

MTP = {
    "model.layers.4.eh_proj.weight": torch.randn(32, 64),
    "model.layers.4.mlp.experts.3.up_proj.weight": torch.randn(16, 32).bfloat16(),
}
NEXT = {
    "mtp.fc.weight": torch.randn(32, 64),
    "mtp.layers.0.mlp.experts.3.up_proj.weight": torch.randn(16, 32).bfloat16(),
}


def saves(path: Path, root: Path) -> None:
    mesh = join_mesh(path, {})
    Checkpoints(root, mesh, keep=1).save(1, build(path, mesh), {})


@pytest.mark.parametrize(
    ("model_type", "mtp"), [("glm4_moe", MTP), ("deepseek_v32", MTP), ("qwen3_next", NEXT)]
)
def test_an_export_has_the_layers_of_the_base(
    model_type: str,
    mtp: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, root = write_tiny(model_type, tmp_path / "base"), tmp_path / "checkpoints"
    config = json.loads((base / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (base / "config.json").write_text(json.dumps(config))
    given = load_file(base / "model.safetensors")
    save_file(mtp, base / "mtp.safetensors")
    run_ranks(1, saves, base, root, folder=tmp_path / "out")

    main(["export", str(root / "iter_0000001"), str(tmp_path / "hf")])
    assert "2 of them untrained, as in the base model" in capsys.readouterr().out
    found = load_file(next((tmp_path / "hf").glob("*.safetensors")))
    assert found.keys() == given.keys() | mtp.keys()
    for name, tensor in (given | mtp).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name

    (base / "mtp.safetensors").unlink()  # transformers leaves these layers out when it saves
    main(["export", str(root / "iter_0000001"), str(tmp_path / "without")])
    assert "untrained" not in capsys.readouterr().out
    assert load_file(next((tmp_path / "without").glob("*.safetensors"))).keys() == given.keys()

    # A file that is missing is found before anything is written.
    names = dict.fromkeys(given, "model.safetensors") | dict.fromkeys(mtp, "mtp.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    monkeypatch.setattr(hf_export, "new_folder", lambda _: pytest.fail("a folder is made"))
    with pytest.raises(SystemExit):
        main(["export", str(root / "iter_0000001"), str(tmp_path / "missing")])
    assert "lists mtp.safetensors, which is not there" in capsys.readouterr().err
