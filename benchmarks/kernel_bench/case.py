"""What one case of the benchmark consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Outputs = dict[str, Tensor]
Run = Callable[[], Outputs]

# The columns of a row that hold candidate median / kernel median.
RIVALS = ("eager", "compile", "liger", "trl")
NOT_COMPILED = "torch.compile is left out with --quick"


@dataclass
class Work:
    """Everything that is timed in a case; its tensors live as long as it does."""

    kernel: Run
    eager: Run
    expected: Callable[[], Outputs]
    """fp64 values of outputs, by name; a candidate may give fewer, and no other."""
    tolerance: dict[str, float]
    """Largest error of the kernel in each output, relative to the largest expected value."""
    floor_bytes: int
    """Bytes that any implementation must read and write: the copy moves as many."""
    compiled: Run | str
    """eager under torch.compile, or why not; it compiles at its first call."""
    liger: Run | str
    trl: Run | str
    prepare: Callable[[], None] = lambda: None
    """Called before every run and not timed: restores inputs that a run may overwrite."""
    rows: Tensor | None = None
    """If given, `expected` holds these rows of outputs only."""
    elementwise: tuple[str, ...] = ()
    """Outputs whose errors are relative to each expected value: they differ in kind."""

    def candidates(self) -> dict[str, Run | str]:
        rivals = (self.eager, self.compiled, self.liger, self.trl)
        return {"kernel": self.kernel, **dict(zip(RIVALS, rivals, strict=True))}


@dataclass(frozen=True)
class Case:
    kernel: str
    variant: str
    shape: tuple[int, ...]
    dtype: str
    build: Callable[[Case, torch.device, bool], Work] = field(repr=False)
    """Makes the work, given the case, the device and whether to compile."""
    threads: int = 1
    num_rounds: int = 15

    @property
    def name(self) -> str:
        size = "x".join(str(n) for n in self.shape)
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.kernel} {self.variant} {size} {self.dtype} {threads}"


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply torch.compile for the one shape of a case, without falling back to eager."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def largest_error(got: Tensor, expected: Tensor, elementwise: bool) -> float:
    """Return max |got - expected| / max |expected|, or max of |got - expected| / |expected|.

    Both of one shape, `expected` fp64. NaN where either holds one, inf where 0 is missed.
    """
    if got.shape != expected.shape:
        raise ValueError(f"got: shape {list(got.shape)}, expected {list(expected.shape)}")
    if not got.numel():
        return 0.0
    error = (got.double() - expected).abs()
    size = expected.abs() if elementwise else expected.abs().max()
    return float(torch.where(error == 0, 0.0, error / size).max())


def errors(work: Work, outputs: Outputs, expected: Outputs) -> dict[str, float]:
    """The largest error of every output that `outputs` has; all on the CPU."""
    found = {}
    for name, value in outputs.items():
        rows = value if work.rows is None else value[work.rows.cpu()]
        found[name] = largest_error(rows, expected[name], name in work.elementwise)
    return found
