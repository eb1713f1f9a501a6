"""This module has the cases of `pack_routes` and `unpack_routes`: T tokens, L layers, K experts a token
of E.

Unpacking takes what one rank of a 2-stage pipeline with 2-way sequence parallelism needs: its half
of the layers and its half of the rows. Exact: what comes out must equal eager's, id by id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernel_bench import eager, peers
from benchmarks.kernel_bench.case import NOT_COMPILED, Case, Outputs, Run, Work, compile_static
from mrl.kernels import pack_routes, unpack_routes

NUM_EXPERTS = 128
BITS = (NUM_EXPERTS - 1).bit_length()


def make_ids(case: Case, device: torch.device) -> Tensor:
    """Make ids u8[T, L, K], distinct in each row."""
    rng = torch.Generator().manual_seed(0)
    num_tokens, num_layers, topk = case.shape
    rows = num_tokens * num_layers
    # A stride that is coprime to E makes the ids of a row distinct.
    first = torch.randint(NUM_EXPERTS, (rows, 1), generator=rng)
    stride = 2 * torch.randint(NUM_EXPERTS // 2, (rows, 1), generator=rng) + 1
    ids = (first + stride * torch.arange(topk)) % NUM_EXPERTS
    return ids.to(torch.uint8).view(case.shape).to(device)


def make_work(
    kernel: Run, plain: Run, compiled: Run | str, expected: Run, name: str, floor_bytes: int
) -> Work:
    return Work(
        kernel=kernel,
        eager=plain,
        expected=expected,
        tolerance={name: 0.0},
        floor_bytes=floor_bytes,
        compiled=compiled,
        liger=f"Liger-Kernel {peers.NO_ROUTES}",
        trl=f"TRL {peers.NO_ROUTES}",
    )


def build_pack(case: Case, device: torch.device, compile_: bool) -> Work:
    ids = make_ids(case, device)
    num_bytes = (case.shape[-1] * BITS + 7) // 8
    compiled = compile_static(eager.pack_routes) if compile_ else None

    def expected() -> Outputs:
        """Bit by bit, as the format is defined: little-endian codes of BITS bits, one after one."""
        bits = (ids.cpu()[..., None] >> torch.arange(BITS, dtype=torch.uint8)) & 1
        bits = bits.flatten(-2)
        bits = torch.nn.functional.pad(bits, (0, 8 * num_bytes - bits.shape[-1]))
        places = (1 << torch.arange(8)).to(torch.uint8)
        return {"packed": (bits.unflatten(-1, (num_bytes, 8)) * places).sum(-1).double()}

    packed_bytes = ids.nbytes // case.shape[-1] * num_bytes
    return make_work(
        lambda: {"packed": pack_routes(ids, NUM_EXPERTS)},
        lambda: {"packed": eager.pack_routes(ids, BITS, num_bytes)},
        (lambda: {"packed": compiled(ids, BITS, num_bytes)}) if compiled else NOT_COMPILED,
        expected,
        "packed",
        ids.nbytes + packed_bytes,
    )


def build_unpack(case: Case, device: torch.device, compile_: bool) -> Work:
    ids = make_ids(case, device)
    num_tokens, num_layers, topk = case.shape
    packed = eager.pack_routes(ids, BITS, (topk * BITS + 7) // 8)
    layers = list(range(num_layers // 2, num_layers))
    start, stop = num_tokens // 2, num_tokens
    index = torch.tensor(layers, device=device)
    compiled = compile_static(eager.unpack_routes) if compile_ else None
    plain_arguments = (packed, BITS, topk, index, start, stop)
    wanted = ids[start:stop, layers].transpose(0, 1)

    def fused() -> Outputs:
        found = unpack_routes(
            packed, num_experts=NUM_EXPERTS, topk=topk, layers=layers, start=start, stop=stop
        )
        return {"ids": found}

    read = (stop - start) * len(layers) * packed.shape[-1]
    return make_work(
        fused,
        lambda: {"ids": eager.unpack_routes(*plain_arguments)},
        (lambda: {"ids": compiled(*plain_arguments)}) if compiled else NOT_COMPILED,
        lambda: {"ids": wanted.cpu().double()},
        "ids",
        read + 8 * wanted.numel(),
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    shape = (64, 4, 8) if quick else (16384, 48, 8)
    rounds = 2 if quick else 9
    return [
        Case("pack_routes", "pack", shape, "uint8", build_pack, num_rounds=rounds),
        Case("unpack_routes", "half of layers and rows", shape, "uint8", build_unpack,
             num_rounds=rounds),
    ]  # fmt: skip
