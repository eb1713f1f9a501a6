"""What is wrong with a model folder, in one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.errors import InputError
from mrl.toy_model import write_toy_model
from parallel.hf_config import HfModel


def test_a_folder_without_weights_says_how_to_get_them(tmp_path: Path) -> None:
    write_toy_model(tmp_path / "model", seed=0)
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.rename(tmp_path / "model/pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"no \*\.safetensors weights; download them, or, where they "
    ):
        HfModel.read(tmp_path / "model")
