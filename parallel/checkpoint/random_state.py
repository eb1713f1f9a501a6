"""The random states of a rank, as bytes in a tensor: a checkpoint holds nothing but tensors."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

STRIDE = 1_000_003
"""The distance between the seeds of two steps."""


def pack_random_state(device: torch.device) -> Tensor:
    """Pack Python's, numpy's, torch's and Megatron's states into u8[any length]."""
    tracker: Any = get_cuda_rng_tracker()
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    stream = io.BytesIO()
    state = {
        "python": [version, list(words), gauss],
        "numpy": json.dumps(numpy_state, default=lambda array: array.tolist()),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None,
        "tracker": tracker.get_states(),
    }
    torch.save(state, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def restore_random_state(packed: Tensor, device: torch.device) -> None:
    """Restore what `pack_random_state` packed, for a rank at the same place of the same layout."""
    stream = io.BytesIO(packed.numpy().tobytes())
    state = torch.load(stream, map_location="cpu", weights_only=True)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = json.loads(state["numpy"])
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(state["tracker"])


def reseed(seed: int, step: int) -> None:
    """Seed for another layout: the same states whenever this step is resumed at that layout."""
    fresh = (seed + STRIDE * step) % 2**32
    random.seed(fresh)
    np.random.seed(fresh)
    torch.manual_seed(fresh)
