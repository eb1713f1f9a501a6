"""SGLang plugin: keep the engine's memory pausable even if megatron-core is installed.

SGLang's debug_utils/dumper.py imports megatron-core where it is installed, and megatron-core's
core/inference/contexts/dynamic_context.py then sets `torch_memory_saver.hook_mode` to "torch" for the
whole process. In that mode CUDA graphs cannot be captured under `enable_memory_saver`: the engine ends
with "Only hook_mode=preload supports pauseable CUDA Graph currently" (seen on an H100). An engine needs
nothing from megatron-core, and without that import it starts some seconds sooner.
"""

import sys


def register():
    sys.modules.setdefault("megatron", None)  # pyright: ignore[reportArgumentType]
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError:  # not installed with engines on CPUs
        return
    torch_memory_saver.hook_mode = "preload"
