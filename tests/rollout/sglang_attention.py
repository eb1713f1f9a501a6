"""Compute attention as SGLang's torch_native backend does: `python sglang_attention.py CALLS RESULTS`.

CALLS is a torch file with a list of (name of the function, tensors, options), RESULTS gets a list of
outputs. In a process of its own, because importing SGLang needs stand-ins for packages and changes
torch.
"""

from __future__ import annotations

import sys

import torch

from mrl.engines.sglang.compat import take


def main() -> None:
    """Run every call."""
    calls, results = sys.argv[1:]
    backend = take("TorchNativeAttnBackend")
    torch.save(
        [
            take(name)(backend.__new__(backend), *tensors, None, **options)
            for name, tensors, options in torch.load(calls)
        ],
        results,
    )


if __name__ == "__main__":
    main()
