"""The plug-in that keeps megatron-core from changing torch_memory_saver in SGLang's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mrl.engines.sglang import plugins

STAND_IN = """
class Saver:
    hook_mode = "preload"
torch_memory_saver = Saver()
"""
"""The package has wheels for GPUs only. This is the attribute that both sides set."""
ORDER = {
    "megatron first": "import {megatron}; mrl_memory_saver.register()",
    "plug-in first": "mrl_memory_saver.register()\ntry: import {megatron}\nexcept ImportError: pass",
}


def hook_mode(folder: Path, code: str) -> str:
    (folder / "torch_memory_saver.py").write_text(STAND_IN)
    server = Path(plugins.__path__[0]) / "server"
    code = code.format(megatron="megatron.core.inference.contexts.dynamic_context")
    ask = "print(torch_memory_saver.torch_memory_saver.hook_mode)"
    done = subprocess.run(
        [sys.executable, "-c", f"import mrl_memory_saver, torch_memory_saver\n{code}\n{ask}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(server)))},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1]


def test_megatron_changes_the_mode_and_the_plugin_takes_it_back(tmp_path) -> None:
    """With "torch" an engine on GPUs cannot capture CUDA graphs."""
    assert hook_mode(tmp_path, "import {megatron}") == "torch"  # else the plug-in can go
    assert hook_mode(tmp_path, ORDER["megatron first"]) == "preload"
    assert hook_mode(tmp_path, ORDER["plug-in first"]) == "preload"
