"""The random states of a rank, packed as bytes into a tensor, because a checkpoint holds only
tensors."""

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
"""The distance between the seeds of consecutive steps."""


def pack_random_state(device: torch.device) -> Tensor:
    """Pack the random states of Python, numpy, torch and Megatron into a tensor u8[n]."""
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
    """Restore the states that `pack_random_state` packed, on the same rank of the same layout."""
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
    """Seed the generators of Python, numpy and torch for a step that is resumed in another layout.
    The same seed and step give the same states."""
    fresh = (seed + STRIDE * step) % 2**32
    random.seed(fresh)
    np.random.seed(fresh)
    torch.manual_seed(fresh)
