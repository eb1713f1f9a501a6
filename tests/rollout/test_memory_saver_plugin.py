"""The plug-in that keeps megatron-core from changing torch_memory_saver in SGLang's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.engines.sglang import plugins

STAND_IN = """
class Saver:
    hook_mode = "preload"
torch_memory_saver = Saver()
"""
"""The package has wheels for GPUs only. This is the attribute that both sides set."""
SHOW = "print(torch_memory_saver.torch_memory_saver.hook_mode)"
MEGATRON_FIRST = f"import {{megatron}}\n{SHOW}\nmrl_memory_saver.register()"
PLUGIN_FIRST = "mrl_memory_saver.register()\ntry: import {megatron}\nexcept ImportError: pass"


def hook_modes(folder: Path, code: str) -> list[str]:
    """What a process prints that runs the code, and the mode at its end."""
    (folder / "torch_memory_saver.py").write_text(STAND_IN)
    server = Path(plugins.__path__[0]) / "server"
    code = code.format(megatron="megatron.core.inference.contexts.dynamic_context")
    done = subprocess.run(
        [sys.executable, "-c", f"import mrl_memory_saver, torch_memory_saver\n{code}\n{SHOW}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(server)))},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_megatron_does_not_change_the_mode_after_the_plugin(tmp_path) -> None:
    """With "torch" an engine on GPUs cannot capture CUDA graphs."""
    assert hook_modes(tmp_path, PLUGIN_FIRST)[-1] == "preload"


@pytest.mark.release
def test_megatron_changes_the_mode_and_the_plugin_takes_it_back(tmp_path) -> None:
    """Else the plug-in can go."""
    assert hook_modes(tmp_path, MEGATRON_FIRST)[-2:] == ["torch", "preload"]
