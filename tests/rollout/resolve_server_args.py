"""What SGLang's own ServerArgs makes of settings for GPUs, on a machine without one.

A program of its own: it answers torch's questions about the device as a node of 8 H100 would, which is
all that ServerArgs asks for, and the CPU stubs on PYTHONPATH stand for sgl_kernel. It reads a list of
settings from its input and writes for each what SGLang resolved and accepted, or why it refused.
`sglang` is the installed one, or another release that comes first on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

GIB = 1 << 30
H100 = SimpleNamespace(
    total_memory=80 * GIB, major=9, minor=0, name="NVIDIA H100 80GB HBM3", multi_processor_count=132
)


def pretend_gpus() -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 8,
        "get_device_capability": (H100.major, H100.minor),
        "get_device_name": H100.name,
        "get_device_properties": H100,
        "mem_get_info": (79 * GIB, H100.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)


def resolved(settings: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    try:
        args = ServerArgs(**settings)
        if hasattr(args, "resolve_once"):  # since 0.5.20; earlier releases do it in the constructor
            args.resolve_once()
        args.check_server_args()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    known = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
    if known.get("attn_dp_size", 1) > 1:  # 0.5.23 has split `dp_size` in two
        known = {**known, "dp_size": known["attn_dp_size"]}
    return {name: known[name] for name in [*settings, "device"] if name in known}


if __name__ == "__main__":
    pretend_gpus()
    answers = [resolved(settings) for settings in json.load(sys.stdin)]
    print(json.dumps(answers, default=str))
