"""The disturbance of `studies.collapse`: noise on what the engine's routers read, and nowhere else.

The engine's plug-in (plugin/mrl_router_noise.py) calls `disturbed`. The noise is a function of the
seed, the layer and the bits of the router's input, so the same input is always disturbed in the same
way, in any batch. It is uniform: integer arithmetic and one multiplication give it, which round alike
everywhere.

Dimensions: n tokens, H hidden size.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy
import torch
from torch import Tensor

VARIABLE = "MRL_ROUTER_NOISE"
"""The environment variable that names the NoiseFile to the engine; without it nothing is disturbed."""
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
_MIX = (-4658895280553007687, -7723592293110705685)  # the multipliers of SplitMix64
_WORDS = {2: torch.int16, 4: torch.int32}


class NoiseFile:
    """The scale and the seed of the noise, in 16 bytes that an engine maps and reads at every pass."""

    def __init__(self, path: Path, mode: Literal["r", "r+", "w+"] = "r+") -> None:
        """Open the file at `path`. `mode` is numpy's: `r` to read, `r+` to change, `w+` to create."""
        self._numbers = numpy.memmap(path, numpy.float64, mode, shape=(2,))

    @classmethod
    def create(cls, path: Path) -> NoiseFile:
        """Create the file, with scale 0: no disturbance."""
        return cls(path, "w+")

    def set(self, scale: float, seed: int) -> None:
        """Change the noise. The engine must not be generating. Raises ValueError for a scale that is
        not finite or is negative."""
        if not 0 <= scale < math.inf:
            raise ValueError(f"router noise: got scale {scale}, expected a finite number from 0 up")
        self._numbers[:] = scale, seed

    def read(self) -> tuple[float, int]:
        """Return (scale, seed)."""
        scale, seed = self._numbers.tolist()
        return scale, int(seed)


def disturbed(x: Tensor, layer: int, scale: float, seed: int) -> Tensor:
    """Return the router's input [n, H] of layer `layer` with noise, in its dtype (fp32, bf16, fp16).

    The noise of an element is uniform with mean 0, and its standard deviation is `scale` times the
    root mean square of the token's row. Scale 0 returns `x` itself.
    """
    if scale == 0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    columns = torch.arange(1, rows.shape[1] + 1)
    salt = _mixed(torch.tensor(seed) * _GOLDEN + layer)
    words = rows.contiguous().view(_WORDS[x.element_size()]).long()
    keys = (words * (_mixed(columns * _GOLDEN + salt) | 1)).sum(1, keepdim=True)  # modulo 2^64
    drawn = _mixed(keys + columns * _GOLDEN)
    uniform = _shifted(drawn, 11).double() * 2.0**-53 - 0.5
    exact = rows.double()
    size = exact.square().mean(1, keepdim=True).sqrt() * (scale * math.sqrt(12))
    return (exact + size * uniform).to(x.dtype).reshape(x.shape)


def _mixed(numbers: Tensor) -> Tensor:
    """Return the finaliser of SplitMix64 (Steele, Lea and Flood 2014) of each i64."""
    for shift, factor in zip((30, 27), _MIX, strict=True):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift i64 to the right as if they were unsigned."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
