"""Muon: SGD with momentum whose update of each weight matrix is orthogonalised.

Per matrix W [m, n] with gradient G, momentum mu, learning rate lr and weight decay wd:

    B <- mu B + (1 - mu) G
    U <- mu B + (1 - mu) G  with Nesterov momentum, else B
    W <- (1 - lr wd) W - lr s NS(U)

NS is the Newton-Schulz iteration of Keller Jordan (https://kellerjordan.github.io/posts/muon/), which
brings all singular values of U near 1. The scale s is a function of the matrix's shape; with
`spectral` and a factor of 0.2 it is that of Moonlight (arXiv 2502.16982, eq. 4), with which a learning
rate of AdamW can be kept.

Legend: m rows (outputs), n columns (inputs) of the whole matrix; shards are parts of it on the ranks of
a tensor-parallel group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.config import OptimizerConfig

COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients (a, b, c) of the iterations, repeated in this order. `simple` is from Jordan's post,
`quintic` from https://leloykun.github.io/ponder/muon-opt-coeffs/; the names are Megatron's."""
EPS = 1e-7
"""Smallest norm by which an update is divided, as in Jordan's code."""


@dataclass(frozen=True)
class Matrix:
    """The place of a parameter in the matrix that is orthogonalised."""

    group: ProcessGroup | None = None
    """The ranks that hold the shards of the matrix; None if this rank has all of it."""
    dim: int = 0
    """The dimension along which the shards are split. The rows of a gated MLP's shards are gathered
    as [gate; up] of one rank after the other, because a permutation of rows permutes the rows of the
    result and changes nothing else."""
    heads: tuple[int, ...] | None = None
    """If set, queries, keys and values are three matrices (four with output gates): the numbers of
    their rows in each query group."""


def newton_schulz(update: Tensor, steps: int, kind: str = "simple") -> Tensor:
    """Return the orthogonalised `update` [m, n], in its own dtype.

    X <- a X + (b A + c A A) X with A = X X^T, from X = U / |U| in the Frobenius norm. The smaller
    side is multiplied with itself.
    """
    is_tall = update.size(0) > update.size(1)
    x = update.T if is_tall else update
    x = x / x.norm().clamp(min=EPS)
    sets = COEFFICIENTS[kind]
    for step in range(steps):
        a, b, c = sets[step % len(sets)]
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def scale_factor(rows: int, columns: int, mode: str) -> float:
    """Return s for a matrix of `rows` outputs and `columns` inputs.

    `spectral`: sqrt(max(m, n)) (arXiv 2502.16982, eq. 4). `shape_scaling`: sqrt(max(1, m / n))
    (Jordan). `unit_rms_norm`: sqrt(m / n) (https://jeremybernste.in/writing/deriving-muon).
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(max(1.0, ratio) if mode == "shape_scaling" else ratio)


class Muon(torch.optim.Optimizer):
    """The Muon of the parameters in `matrices`, each of which may be a shard of a matrix.

    `step` is a collective of each parameter's group. The ranks of a group must therefore have the same
    parameters in the same order.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        matrices: Mapping[Tensor, Matrix],
        config: OptimizerConfig,
        dtype: torch.dtype,
    ) -> None:
        """Make the optimizer for fp32 parameters. The iteration runs in `dtype`."""
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self.matrices, self.config, self.dtype = matrices, config, dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        momentum = self.config.muon_momentum
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                update = buffer = state["momentum_buffer"]
                buffer.lerp_(gradient, 1 - momentum)
                if self.config.muon_use_nesterov:
                    update = gradient.lerp(buffer, momentum)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                self._add(parameter, update, group["lr"])

    def _add(self, parameter: Tensor, update: Tensor, lr: float) -> None:
        """Subtract lr s NS(update) from this rank's shard of a matrix."""
        config, matrix = self.config, self.matrices[parameter]
        whole, index, size = _gather(update.to(self.dtype), matrix)
        axis = 0 if matrix.dim == 0 else -1
        for target, piece in zip(_pieces(parameter, matrix), _pieces(whole, matrix), strict=True):
            flat = piece.flatten(0, -2)
            done = newton_schulz(flat, config.muon_num_ns_steps, config.muon_coefficient_type)
            scale = scale_factor(flat.size(0), flat.size(1), config.muon_scale_mode)
            scale *= config.muon_extra_scale_factor
            target.add_(done.view(piece.shape).chunk(size, axis)[index], alpha=-lr * scale)


def _gather(shard: Tensor, matrix: Matrix) -> tuple[Tensor, int, int]:
    """Return the whole matrix, the index of this rank's shard, and the number of shards."""
    if matrix.group is None:
        return shard, 0, 1
    shards = [torch.empty_like(shard) for _ in range(matrix.group.size())]
    dist.all_gather(shards, shard.contiguous(), group=matrix.group)
    return torch.cat(shards, matrix.dim), matrix.group.rank(), len(shards)


def _pieces(tensor: Tensor, matrix: Matrix) -> list[Tensor]:
    """Return views of the matrices that are orthogonalised apart: [m, n], or [query groups, rows, n]
    for each of queries, keys and values."""
    if matrix.heads is None:
        return [tensor]
    return list(tensor.unflatten(0, (-1, sum(matrix.heads))).split(matrix.heads, dim=1))


class MuonAndAdam:
    """A Muon and an Adam that Megatron steps as one torch optimizer.

    Megatron's own form of Muon chains them, and gives the gradient norm of each to its own process
    group; here both stay in the part of the chain that Megatron made for Adam.
    """

    def __init__(self, muon: Muon, adam: torch.optim.Optimizer) -> None:
        self.sub_optimizers: list[torch.optim.Optimizer] = [muon, adam]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both; the schedule writes the learning rate into them."""
        return [group for each in self.sub_optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of both by tensor. The dict is a copy; its values are the state itself."""
        return {tensor: s for each in self.sub_optimizers for tensor, s in each.state.items()}

    def step(self) -> None:
        for each in self.sub_optimizers:
            each.step()
