"""SGLang plug-in of `studies.collapse`: disturbs what the routers read, and nothing else.

A MoE layer gives its hidden states to the router's gate and to the experts. Here the gate gets them
with noise (noise.py), so other experts are chosen, with other weights; the experts get the states as
they are. The folder of this file is on the path of that study's engines only.
"""

import os
from pathlib import Path

from mrl.engines.sglang.compat import hook
from studies.collapse_study.noise import VARIABLE, NoiseFile, disturbed

files = []
"""The NoiseFile, once this process has opened it."""


def register():
    if VARIABLE in os.environ:
        hook("load_bucket", note_routers, "BEFORE")
        hook("UnquantizedLinearMethod.apply", apply_linear, "AROUND")


def note_routers(updater, *args, **options):
    """Mark the gates of the model's routers with the numbers of their MoE layers, from 1."""
    if files:
        return
    files.append(NoiseFile(Path(os.environ[VARIABLE]), "r"))
    # 0.5.12 has a worker instead of the updater.
    model = updater.get_model() if hasattr(updater, "get_model") else updater.model_runner.model
    blocks = [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "topk")]
    if not blocks:
        raise RuntimeError(f"{VARIABLE} is set, but {type(model).__name__} has no router")
    for number, block in enumerate(blocks, start=1):
        block.gate.mrl_router = number


def apply_linear(original, method, layer, x, bias=None):
    number = getattr(layer, "mrl_router", None)
    if number is not None:
        x = disturbed(x, number, *files[0].read())
    return original(method, layer, x, bias)
