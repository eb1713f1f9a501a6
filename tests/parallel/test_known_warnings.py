"""Warnings of Megatron about what mrl has decided are silent in every process that imports it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import warnings
import parallel
warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
warnings.warn("Apex is not installed. Falling back to Torch Norm")
warnings.warn("something of the user's own")
"""


def test_importing_the_room_is_enough() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert "Apex" not in done.stderr
    assert "something of the user's own" in done.stderr
