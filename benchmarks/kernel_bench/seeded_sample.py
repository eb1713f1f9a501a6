"""This module has the cases of `seeded_sample`: B rows of a decode step, V vocabulary.

Eager is what SGLang's sampler runs in torch on a CPU: the logarithm of the probabilities, then the hash
and the Gumbel noise of every token in int64 and fp64, and an argmax.
"""

from __future__ import annotations

import torch

from benchmarks.kernel_bench.case import Case, Outputs, Work
from mrl.kernels import oracle, seeded_sample

NOTHING = "has no seeded sampler"
NOT_COMPILED = "torch.compile is off in SGLang's CPU engine: left out"


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    num_rows, vocab = case.shape
    rng = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(num_rows, vocab, generator=rng), -1)
    seeds = torch.randint(0, 2**62, (num_rows,), generator=rng)
    positions = torch.randint(0, 1000, (num_rows,), generator=rng)
    scores = probs if case.variant == "probs" else probs.double().log()
    are_probs = case.variant == "probs"

    def plain() -> Outputs:
        return {"ids": oracle.seeded_sample(scores, seeds, positions, are_probs=are_probs)}

    return Work(
        kernel=lambda: {"ids": seeded_sample(scores, seeds, positions, are_probs=are_probs)},
        eager=plain,
        expected=lambda: {"ids": plain()["ids"].double()},
        tolerance={"ids": 0.0},
        floor_bytes=scores.nbytes + 3 * seeds.nbytes,
        compiled=NOT_COMPILED,
        liger=f"Liger-Kernel {NOTHING}",
        trl=f"TRL {NOTHING}",
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    if cuda:
        return []
    shapes = [(3, 40)] if quick else [(32, 49_152), (128, 128)]
    rounds = 2 if quick else 25
    return [
        Case("seeded_sample", variant, shape, dtype, build, num_rounds=rounds)
        for variant, dtype in (("probs", "float32"), ("logprobs", "float64"))
        for shape in shapes
    ]
