"""This module has the cases of `seq_logratio` and `packed_gae`: B sequences of T tokens, a quarter
prompt.

Neither has a gradient. Frameworks hold [B, T], the kernels packed [N] with N = B T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernel_bench import eager, peers
from benchmarks.kernel_bench.case import NOT_COMPILED, Case, Outputs, Work, compile_static
from mrl.kernels import oracle, packed_gae, seq_logratio

GAMMA, LAM = 0.99, 0.95


class Packed(NamedTuple):
    first: Tensor  # f32[N]: log-probabilities, or rewards
    second: Tensor  # f32[N]: old log-probabilities, or values
    loss_mask: Tensor  # bool[N]
    cu_seqlens: Tensor  # i32[B + 1]


def make_packed(case: Case, device: torch.device) -> Packed:
    num_sequences, length = case.shape
    rng = torch.Generator().manual_seed(0)
    first = torch.randn(num_sequences * length, generator=rng)
    second = first + 0.2 * torch.randn(num_sequences * length, generator=rng)
    mask = (torch.arange(length) >= length // 4).repeat(num_sequences)
    bounds = torch.arange(0, num_sequences * length + 1, length, dtype=torch.int32)
    return Packed(*(tensor.to(device) for tensor in (first, second, mask, bounds)))


def build_logratio(case: Case, device: torch.device, compile_: bool) -> Work:
    packed = make_packed(case, device)
    padded = [tensor.view(case.shape).float() for tensor in packed[:3]]
    compiled = compile_static(eager.seq_logratio) if compile_ else None

    def expected() -> Outputs:
        return {"sums": oracle.seq_logratio(*packed)}

    outputs_bytes = 16 * case.shape[0]
    return Work(
        kernel=lambda: {"sums": seq_logratio(*packed)},
        eager=lambda: {"sums": eager.seq_logratio(*padded)},
        expected=expected,
        tolerance={"sums": 1e-6},
        floor_bytes=sum(tensor.nbytes for tensor in packed) + outputs_bytes,
        compiled=(lambda: {"sums": compiled(*padded)}) if compiled else NOT_COMPILED,
        liger=f"Liger-Kernel {peers.NO_LOGRATIO}",
        trl=f"TRL {peers.NO_LOGRATIO}",
    )


def build_gae(case: Case, device: torch.device, compile_: bool) -> Work:
    packed = make_packed(case, device)
    padded = [tensor.view(case.shape).float() for tensor in packed[:3]]

    def fused() -> Outputs:
        advantages, returns = packed_gae(*packed, gamma=GAMMA, lam=LAM)
        return {"advantages": advantages, "returns": returns}

    def plain() -> Outputs:
        advantages, returns = eager.gae(*padded, GAMMA, LAM)  # pyright: ignore[reportCallIssue]
        return {"advantages": advantages.flatten(), "returns": returns.flatten()}

    def expected() -> Outputs:
        given = [tensor.cpu() for tensor in packed]
        advantages, returns = oracle.packed_gae(*given, gamma=GAMMA, lam=LAM)
        return {"advantages": advantages, "returns": returns}

    return Work(
        kernel=fused,
        eager=plain,
        expected=expected,
        tolerance={"advantages": 1e-6, "returns": 1e-6},
        floor_bytes=sum(tensor.nbytes for tensor in packed) + 2 * packed.first.nbytes,
        compiled="torch.compile unrolls the loop over time, a copy of its body for each token",
        liger=f"Liger-Kernel {peers.NO_GAE}",
        trl=f"TRL {peers.NO_GAE}",
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    shape = (3, 40) if quick else (256, 2048)
    rounds = 2 if quick else 25
    found = [
        Case("seq_logratio", "forward", shape, "float32", build_logratio, num_rounds=rounds),
        Case("packed_gae", "forward", shape, "float32", build_gae, num_rounds=rounds),
    ]
    if not quick and not cuda:
        found.append(Case("packed_gae", "forward", shape, "float32", build_gae, 2, rounds))
    return found
