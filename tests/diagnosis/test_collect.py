"""What a run says about its decompositions."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.config import load_recipe
from mrl.diagnosis.collect import LONG_S, Diagnosis
from mrl.run.folder import RunFolder
from tests.loop.conftest import TOY_RECIPE


def test_a_long_decomposition_says_once_how_to_shorten_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unused: Any = None
    recipe = load_recipe(TOY_RECIPE, [])
    diagnosis = Diagnosis(recipe, unused, unused, unused, unused, RunFolder("run"))
    diagnosis._say_long(0, LONG_S)
    assert capsys.readouterr().out == ""
    diagnosis._say_long(0, 290)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("step 0: 290 s of this step went into the decomposition of the mismatch")
    assert "a smaller diagnosis.decompose_layers (now 8) or a larger" in said
    diagnosis._say_long(10, 290)
    assert capsys.readouterr().out == ""
