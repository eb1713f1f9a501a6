"""Imports what a lane's server imports, on a machine without a GPU: `python try_imports.py`.

torch's CUDA queries are answered as a Hopper GPU would, because SGLang decides by them what to import;
no kernel runs. For finding what requirements/gpu-lane.txt lacks: needs Python 3.12, torch 2.11.0+cu130
and the environment that unpack.py prints; sgl_kernel also wants a libcuda.so.1, of which an empty
stand-in with the symbols it names will do. Prints a line a module; the last is `N passed, N failed`.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch

MODULES = """
sgl_kernel torch_memory_saver megatron.core sglang.srt.plugins sglang.launch_server
sglang.srt.server_args sglang.srt.entrypoints.http_server sglang.srt.managers.scheduler
sglang.srt.managers.detokenizer_manager sglang.srt.managers.data_parallel_controller
sglang.srt.model_executor.model_runner sglang.srt.model_executor.cuda_graph_runner
sglang.srt.layers.attention.triton_backend sglang.srt.layers.moe.moe_runner.triton
sglang.srt.layers.moe.fused_moe_triton sglang.srt.models.qwen3_moe sglang.srt.models.qwen2_moe
sglang.srt.models.registry sglang.srt.utils.weight_checker
"""
HOPPER = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H200", total_memory=139 << 30, multi_processor_count=132,
    uuid="none", L2_cache_size=60 << 20, warp_size=32, gcnArchName="",
)  # fmt: skip


def pretend() -> None:
    """Answer torch.cuda's queries; the driver is never asked."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": HOPPER,
        "get_device_name": HOPPER.name,
        "mem_get_info": (138 << 30, 139 << 30),
        "is_initialized": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


def main() -> None:
    pretend()
    failed = 0
    names = MODULES.split()
    for name in names:
        try:
            importlib.import_module(name)
            print(f"{name}: imported", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
