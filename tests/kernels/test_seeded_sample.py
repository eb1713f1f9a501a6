"""`mrl::seeded_sample` against SGLang's formula in torch: the same ids, whatever the inputs."""

from __future__ import annotations

import ast
import importlib.metadata
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import oracle
from mrl.kernels.oracle.seeded_sample import murmur_hash32
from mrl.kernels.oracle.seeded_sample import seeded_sample as reference
from mrl.kernels.seeded_sample import seeded_sample
from tests.kernels.threads import kernel_threads
from tests.release import release

KINDS = ("probs", "logprobs32", "logprobs64", "logprobs16")
UINT32 = 0xFFFFFFFF


def murmur3_x86_32(data: bytes) -> int:
    """Appleby's reference algorithm for whole blocks, seed 0, one number at a time."""
    state = 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        state = state ^ block
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def position_for(seed: int, column: int, hash_: int) -> int:
    """The position at which (seed, position, column) has this hash: MurmurHash3, backwards."""

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) % 2**32

    def mixed(block: int) -> int:
        return rotate(block * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32

    def before(state: int) -> int:  # a block was mixed in
        return rotate((state - 0xE6546B64) * pow(5, -1, 2**32) % 2**32, 19)

    state = hash_ ^ hash_ >> 16
    state = state * pow(0xC2B2AE35, -1, 2**32) % 2**32
    state = (state ^ state >> 13 ^ state >> 26) * pow(0x85EBCA6B, -1, 2**32) % 2**32
    state = state ^ state >> 16 ^ 16
    state = before(before(state) ^ mixed(column))
    first = 0
    for block in (seed & UINT32, seed >> 32):
        first = (rotate(first ^ mixed(block), 13) * 5 + 0xE6546B64) % 2**32
    block = (state ^ first) * pow(0x1B873593, -1, 2**32) % 2**32
    return rotate(block, 17) * pow(0xCC9E2D51, -1, 2**32) % 2**32


def make(kind: str, num: int, vocab: int, rng: torch.Generator) -> Tensor:
    """Scores [num, vocab] of peaked and flat rows, a third of them with zeros."""
    width = torch.rand(num, 1, generator=rng) * 6
    logits = torch.randn(num, vocab, generator=rng) * width
    cut = (torch.rand(num, vocab, generator=rng) < 0.3) & (width < 2)
    cut[:, 0] = False
    logits = logits.masked_fill(cut, -torch.inf)
    probs = torch.softmax(logits, -1)
    if kind == "probs":
        return probs
    if kind == "logprobs64":
        return probs.double().log()
    return torch.log_softmax(logits, -1).to(
        torch.bfloat16 if kind.endswith("16") else torch.float32
    )


def places(num: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Seeds of all 64 bits, and positions."""
    low, high = -(2**63), 2**63 - 1
    seeds = torch.randint(low, high, (num,), generator=rng)
    return seeds, torch.randint(0, 2**31 - 1, (num,), generator=rng, dtype=torch.int32)


def check(scores: Tensor, seeds: Tensor, positions: Tensor, *, are_probs: bool) -> None:
    expected = reference(scores, seeds, positions, are_probs=are_probs)
    got = seeded_sample(scores, seeds, positions, are_probs=are_probs)
    assert torch.equal(got, expected)


def test_hash_equals_murmur3() -> None:
    assert murmur3_x86_32(b"test") == 0xBA6BD213  # A published vector.
    seeds = torch.tensor([0, 42, 2**32 + 5, 2**63 - 1])
    positions = torch.tensor([0, 1, 511, 2**31 - 1], dtype=torch.int32)
    got = murmur_hash32(seeds, positions, torch.arange(200))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        prefix = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
        expected = [murmur3_x86_32(prefix + column.to_bytes(4, "little")) for column in range(200)]
        assert got[row].tolist() == expected


def test_the_reference_is_sglangs_function() -> None:
    """SGLang's own text, with its hash, which is a Triton kernel, replaced by the reference's."""
    site = importlib.metadata.distribution("sglang").locate_file("sglang/srt/layers/sampler.py")
    name = "multinomial_with_seed"
    tree = ast.parse(Path(str(site)).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == name]
    tree.body[0].decorator_list = []  # pyright: ignore[reportAttributeAccessIssue]
    own = {
        "torch": torch,
        "murmur_hash32": lambda seed, *rest: murmur_hash32(seed.view(torch.int64), *rest),
    }
    exec(compile(tree, "sampler.py", "exec"), own)
    rng = torch.Generator().manual_seed(3)
    for kind in KINDS:
        scores, (seeds, positions) = make(kind, 500, 300, rng), places(500, rng)
        logprobs = torch.log(scores) if kind == "probs" else scores
        drawn = own[name](logprobs, seeds, positions)[:, 0]
        assert torch.equal(reference(scores, seeds, positions, are_probs=kind == "probs"), drawn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "num"),
    [
        *((1, 2000), (7, 10_000), (128, 2000), (1000, 200), (49_152, 5)),
        *(release(*case) for case in ((7, 1_000_000), (128, 8000), (1000, 1000), (49_152, 20))),
    ],
)
def test_many_draws_are_the_same(kind: str, vocab: int, num: int) -> None:
    rng = torch.Generator().manual_seed(vocab)
    scores, (seeds, positions) = make(kind, num, vocab, rng), places(num, rng)
    check(scores, seeds, positions, are_probs=kind == "probs")


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_answers_for_nearly_all_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(1)
    scores, (seeds, positions) = make(kind, 40_000, 50, rng), places(40_000, rng)
    opened = count_open(monkeypatch)
    seeded_sample(scores, seeds, positions, are_probs=kind == "probs")
    assert len(opened) < 10


def count_open(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry for each row that the op has torch compute."""
    opened: list[int] = []

    def counted(*args, **options) -> Tensor:
        opened.append(1)
        return reference(*args, **options)

    monkeypatch.setattr(oracle, "seeded_sample", counted)
    return opened


@pytest.mark.parametrize("kind", KINDS[:3])
def test_near_ties_are_torchs_to_decide(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs that all but cancel the noise: last bits of logarithms choose the token."""
    num, vocab = 1500, 40
    rng = torch.Generator().manual_seed(5)
    seeds, positions = places(num, rng)
    uniform = murmur_hash32(seeds, positions, torch.arange(vocab)).double() / UINT32
    logprobs = uniform.log().neg().log()
    probs = logprobs.exp() / vocab
    # Most units in the last place from a tie, from 0 up to some that the kernel decides itself.
    size = 10.0 ** -torch.randint(2, 17, (num, 1), generator=rng)
    probs *= 1 + size * torch.randint(-3, 4, (num, vocab), generator=rng)
    scores = {
        "probs": probs.float(), "logprobs32": probs.log().float(), "logprobs64": probs.log()
    }[kind]  # fmt: skip
    opened = count_open(monkeypatch)
    check(scores, seeds, positions, are_probs=kind == "probs")
    if kind != "logprobs32":  # rounded to fp32, log-probs are not near enough to a tie
        assert 50 < len(opened) < num
    assert torch.unique(reference(scores, seeds, positions, are_probs=kind == "probs")).numel() > 30


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("hash_", [0, 1, 2, UINT32, UINT32 - 1, UINT32 - 2, UINT32 - 3])
def test_the_ends_of_the_uniform_numbers(kind: str, hash_: int) -> None:
    """0 and 2**32 - 1 are clamped; the latter wins nearly every row that it is in."""
    for vocab, column in ((1, 0), (5, 3), (200, 17), (200, 199)):
        seeds = torch.arange(50) * 2**33
        positions = torch.tensor([position_for(seed, column, hash_) for seed in seeds.tolist()])
        assert (murmur_hash32(seeds, positions, torch.tensor([column])) == hash_).all()
        scores = make(kind, 50, vocab, torch.Generator().manual_seed(column))
        check(scores, seeds, positions, are_probs=kind == "probs")
        if kind != "probs":
            for value in (-torch.inf, 30.0, 712.0):  # the smallest Gumbel number is -709.8
                scores[:, column] = value
                check(scores, seeds, positions, are_probs=False)


TINY = 2.0**-149
SPECIAL = {
    "probs": [0.0, -0.0, TINY, 1000 * TINY, 2.0**-126, 1e-30, 1.0, 1e30, math.inf, math.nan, -1.0],
    "logprobs32": [-math.inf, -1e38, -104.0, -60.0, 0.0, 59.0, 1e38, math.inf, math.nan],
    "logprobs64": [-math.inf, -1e308, -745.0, -60.0, 0.0, 59.0, 700.0, 1e308, math.inf, math.nan],
}


@pytest.mark.parametrize(
    ("vocab", "flush"), [*((n, False) for n in (1, 2, 7, 64, 130)), (7, True), (130, True)]
)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_zeros_denormals_infinities_and_nan(kind: str, vocab: int, flush: bool) -> None:
    """Whole rows of each value, rows of two of them, and single ones among usual values."""
    rng = torch.Generator().manual_seed(vocab)
    dtype = torch.float64 if kind == "logprobs64" else torch.float32
    values = torch.tensor(SPECIAL[kind], dtype=dtype)
    blocks = [values[:, None].expand(-1, vocab)]
    pairs = torch.randint(0, len(values), (100, 2), generator=rng)
    which = torch.randint(0, 2, (100, vocab), generator=rng)
    blocks.append(values[pairs.gather(1, which)])
    usual = make(kind, 100, vocab, rng)
    place = torch.randint(0, vocab, (100, 1), generator=rng)
    blocks.append(usual.scatter(1, place, values[pairs[:, :1]]))
    scores = torch.cat(blocks)
    torch.set_flush_denormal(flush)
    try:
        check(scores, *places(len(scores), rng), are_probs=kind == "probs")
    finally:
        torch.set_flush_denormal(False)


@given(
    seed=st.integers(0, 2**31), vocab=st.sampled_from([1, 7, 63, 64, 65, 128, 777]), data=st.data()
)
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_its_batch(seed: int, vocab: int, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    order = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=30))
    threads = data.draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(seed)
    scores, (seeds, positions) = make(kind, 12, vocab, rng), places(12, rng)
    scores[3] = torch.nan  # computed by torch
    whole = seeded_sample(scores, seeds, positions, are_probs=kind == "probs")
    wide = torch.zeros(len(order), vocab + 3, dtype=scores.dtype)
    wide[:, 1 : vocab + 1] = scores[order]
    with kernel_threads(threads):
        part = seeded_sample(
            wide[:, 1 : vocab + 1], seeds[order], positions[order], are_probs=kind == "probs"
        )
    assert torch.equal(part, whole[order])


WITHOUT_TORCH = """
import numpy as np
from mrl import _C
rng = np.random.default_rng(0)
probs = rng.dirichlet(np.full(1000, 0.2), size=300).astype(np.float32)
seeds, positions, ids = (np.arange(300) * n for n in (2**40 + 7, 3, 1))
with np.errstate(divide="ignore"):
    logs = np.log(probs)
for kind, x in enumerate((probs, logs, logs.astype(np.float64))):
    _C.seeded_sample_cpu(scores=x.ctypes.data, seeds=seeds.ctypes.data, num_rows=300, kind=kind,
                         positions=positions.ctypes.data, num_columns=1000, ids=ids.ctypes.data,
                         num_threads=1)
    print(*ids)
"""
"""It chooses the instruction set once a process; torch would take seconds to import."""


def test_every_instruction_set_gives_the_same() -> None:
    printed = set()
    for target in ("narrow", "medium", "wide"):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH],
            env={"MRL_CPU_TARGET": target, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=False,
        )
        if "one that this processor has" not in done.stderr:
            assert done.returncode == 0, done.stderr
            printed.add(done.stdout)
    assert len(printed) == 1
    assert len(set(printed.pop().split())) > 100


def test_torch_knows_the_op() -> None:
    rng = torch.Generator().manual_seed(0)
    scores, (seeds, positions) = make("probs", 4, 9, rng), places(4, rng)
    torch.library.opcheck(torch.ops.mrl.seeded_sample, (scores, seeds, positions, True))
    assert seeded_sample(scores[:0], seeds[:0], positions[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scores": torch.rand(3)}, r"scores: got shape \[3\], expected \[B, V\]"),
        ({"scores": torch.rand(3, 0)}, r"scores: got shape \[3, 0\], .* V >= 1"),
        ({"scores": torch.ones(3, 2, dtype=torch.int64)}, "scores: got dtype torch.int64"),
        ({"scores": torch.rand(3, 2).double(), "are_probs": True}, "expected torch.float32"),
        ({"seeds": torch.zeros(2, dtype=torch.int64)}, r"seeds: got shape \[2\], expected \[3\]"),
        ({"positions": torch.zeros(3)}, "positions: got dtype torch.float32"),
    ],
)
def test_bad_arguments_are_named(change: dict, says: str) -> None:
    whole = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=says):
        seeded_sample(**{"scores": torch.rand(3, 2), "seeds": whole, "positions": whole} | change)
