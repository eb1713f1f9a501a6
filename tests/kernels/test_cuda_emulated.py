"""The CUDA kernels of policy_loss, seq_logratio and vp_logprob, their source run on a CPU.

`emulated_cuda` sends the same public ops to the emulated kernels: they must agree with the CPU
kernels whatever the order of threads, and with themselves bit for bit however tokens are packed.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from emulator import ORDERS

from mrl.kernels import seq_logratio
from tests.kernels.policy_cases import (
    FEW_OPTIONS,
    Options,
    assert_close,
    make_case,
    run_op,
    run_oracle,
    select,
    with_garbage,
)
from tests.kernels.test_vp_logprob import (
    DTYPES,
    assert_exact_at_any_level,
    expected,
    make_logits,
    run,
)
from tests.release import only_in_release, release

LENGTHS = [40, 0, 1, 1030, 17, 2050, 33]


# test_policy_loss_bits has each of the options in two orders. `make test` leaves out those whose values
# the others have.
@pytest.mark.parametrize(
    ("o", "order"),
    [
        release(*case) if number in (0, 5, 6, 7) else case
        for number, case in enumerate(zip(FEW_OPTIONS, cycle(ORDERS), strict=False))
    ],
    ids=str,
)
def test_policy_loss_matches_the_cpu(emulated_cuda, o, order) -> None:
    case = make_case(LENGTHS, seed=7, token_advantages=order == "reverse")
    cpu = run_op(case, o)
    with emulated_cuda(order):
        cuda = run_op(case, o)
    assert_close(cuda, cpu, rtol=1e-5)
    assert_close(cuda, run_oracle(case, o), rtol=2e-5)


# In `make test`: a token's ratio with weights by sequence, and a sequence's with weights by token.
@pytest.mark.parametrize(
    "o", only_in_release(FEW_OPTIONS, lambda o: o not in (FEW_OPTIONS[1], FEW_OPTIONS[5])), ids=str
)
def test_policy_loss_bits(emulated_cuda, o) -> None:
    """Packing order, batch size and thread order change nothing; nor does what is masked."""
    case = make_case(LENGTHS, seed=3)
    with emulated_cuda("forward"):
        whole = run_op(case, o)
        dirty = run_op(with_garbage(case, torch.nan), o)
        parts = [run_op(select(case, [i]), o) for i in range(len(LENGTHS))]
    with emulated_cuda("shuffled", seed=1):
        again = run_op(case, o)
        order = [3, 0, 6, 2, 5, 1, 4]
        mixed = run_op(select(case, order), o)
    for other in (dirty, again):
        for name in ("loss", "grad", "stats", "seq_stats"):
            assert torch.equal(getattr(other, name), getattr(whole, name)), name
    grads = whole.grad.split(LENGTHS)
    assert torch.equal(mixed.grad, torch.cat([grads[i] for i in order]))
    assert torch.equal(mixed.seq_stats, whole.seq_stats[order])
    assert torch.equal(mixed.stats, whole.stats)
    assert torch.equal(torch.cat([part.grad for part in parts]), whole.grad)
    assert torch.equal(torch.cat([part.seq_stats for part in parts]), whole.seq_stats)


@pytest.mark.parametrize(
    "lengths", [[], [0], release([0, 0, 0]), [1], release([1024]), [1023, 1, 1025]]
)
def test_policy_loss_edges(emulated_cuda, lengths) -> None:
    case = make_case(lengths, seed=1)
    for o in FEW_OPTIONS[::4]:
        cpu = run_op(case, o)
        with emulated_cuda("reverse"):
            assert_close(run_op(case, o), cpu)


@pytest.mark.parametrize("order", ORDERS)
def test_seq_logratio_matches_the_cpu(emulated_cuda, order) -> None:
    case = make_case(LENGTHS, seed=7)
    given = (case.logprobs, case.old_logprobs, case.loss_mask, case.cu_seqlens)
    cpu = seq_logratio(*given)
    with emulated_cuda(order):
        torch.testing.assert_close(seq_logratio(*given), cpu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bounds", [[0, 9, 5, 30], [0, 10, 31], [3, 10, 30], [0, 10, 29]])
def test_bad_cu_seqlens_stop_the_kernel(emulated_cuda, bounds) -> None:
    case = make_case([10] * 3)
    wrong = torch.tensor(bounds + [30] * (4 - len(bounds))).int()
    if wrong[-1] != 30 or len(bounds) < 4:
        wrong[-1] = bounds[-1]
    with emulated_cuda("forward"), pytest.raises((RuntimeError, ValueError), match="cu_seqlens"):
        seq_logratio(case.logprobs, case.old_logprobs, case.loss_mask, wrong)


@pytest.mark.parametrize(
    ("dtype", "order", "columns"),
    [
        *product(DTYPES, ["forward"], [1, 100, 1503]),
        *((torch.float32, order, 100) for order in ("reverse", "shuffled")),
        *(release(dtype, "forward", 32) for dtype in DTYPES),
        *(
            release(*case)
            for case in product([torch.float32, torch.bfloat16], ["reverse", "shuffled"], [1503])
        ),
        *(release(*case) for case in product(DTYPES, ORDERS, [4748])),
    ],
    ids=str,
)
def test_vp_logprob_matches_the_cpu(emulated_cuda, dtype, order, columns) -> None:
    logits, labels = make_logits(5, columns + 3, dtype, scale=2.0)
    logits, labels = logits[:, 3:], labels.clamp(max=columns - 1)  # rows that start unaligned
    mask = torch.tensor([True, True, False, True, True])
    cpu = run(logits, labels, mask, temperature=0.7)
    with emulated_cuda(order):
        cuda = run(logits, labels, mask, temperature=0.7)
    wanted = expected(logits, labels, mask, temperature=0.7)
    for got, other, exact in zip(cuda, cpu, wanted, strict=True):
        step = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(got.dtype, 0.0)
        scale = float(exact.abs().max())
        torch.testing.assert_close(got.double(), other.double(), rtol=0, atol=4e-6 + step * scale)
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=4e-6 + step * scale)


@pytest.mark.parametrize("name", ["padding", "all but one", "one far above"])
def test_vp_logprob_extremes(emulated_cuda, name) -> None:
    logits, labels = make_logits(4, 1024, torch.float32)
    if name == "padding":
        logits[:, 300:] = -torch.inf
        labels.clamp_(max=299)
    elif name == "all but one":
        logits[:, 1:] = -torch.inf
        labels[:] = 0
    else:
        logits[:, 900] = 500.0
    cpu = run(logits, labels)
    with emulated_cuda("forward"):
        cuda = run(logits, labels)
    for got, other in zip(cuda, cpu, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-5, atol=4e-6)
    logits[0, 17] = torch.nan
    with emulated_cuda("forward"):
        logprobs, entropy, grad = run(logits, labels)
    assert logprobs[0].isnan()
    assert entropy[0].isnan()
    assert grad[0].isnan().any()
    assert grad[1:].isfinite().all()


def test_vp_logprob_ranks_and_alignment_change_no_bit(emulated_cuda) -> None:
    from mrl.kernels.vp_logprob import tile_size

    logits, labels = make_logits(3, 2 * 32 * 37, torch.bfloat16)  # ranks start at odd addresses
    ops = torch.ops.mrl
    columns = logits.shape[1]
    with emulated_cuda("forward"):
        whole = run(logits, labels)
        for ranks in (2, 4):
            local, tile = columns // ranks, tile_size(columns // ranks, ranks)
            tiles = torch.stack([
                ops.vp_logprob_stats(part.contiguous(), labels, None, r * local, columns, tile, 1.0)
                for r, part in enumerate(logits.split(local, dim=1))
            ])  # fmt: skip
            got = ops.vp_logprob_combine(
                logits[:, :local].contiguous(), labels, None, tiles, 0, tile, 1.0, False
            )
            assert torch.equal(got[0], whole[0])
            assert torch.equal(got[2], whole[1])


@pytest.mark.parametrize(
    "dtype", only_in_release(DTYPES, lambda dtype: dtype == torch.float16), ids=str
)
def test_vp_logprob_whole_blocks_have_the_bits_of_single_columns(emulated_cuda, dtype) -> None:
    """A tile of whole blocks and a long rest, from an aligned address and from one that is not."""
    columns = 8192 + 1000
    logits, labels = make_logits(2, columns, dtype)
    shifted = torch.full((2, columns + 8), 50.0, dtype=dtype)[:, 1 : columns + 1].copy_(logits)
    ops, g = torch.ops.mrl, torch.tensor([0.7, -1.2])

    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        tiles = ops.vp_logprob_stats(x, labels, None, 0, columns, columns, 1.0)
        combined = ops.vp_logprob_combine(x, labels, None, tiles[None], 0, columns, 1.0, False)
        given = (labels, None, combined[1], combined[2], g, 0.1 * g, 0, 1.0)
        return [*combined, ops.vp_logprob_bwd(x, *given)]

    cpu = everything(logits)
    with emulated_cuda("forward"):
        aligned, single = everything(logits), everything(shifted)
    step = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(dtype, 0.0)
    for one, other, near in zip(aligned, single, cpu, strict=True):
        assert torch.equal(one, other)
        atol = 4e-6 + (step if near.dim() == 2 else 0.0)
        torch.testing.assert_close(one.double(), near.double(), rtol=0, atol=atol)


def test_vp_logprob_is_exact_at_any_level_of_the_logits(emulated_cuda) -> None:
    with emulated_cuda("forward"):
        assert_exact_at_any_level(num_rows=50)


def test_options_are_all_covered() -> None:
    """FEW_OPTIONS has every value of every option at least once."""
    seen = {(o.ratio, o.clip.kind) for o in FEW_OPTIONS}
    assert {ratio for ratio, _ in seen} == {"token", "sequence"}
    assert {clip for _, clip in seen} == {"none", "ppo", "cispo", "sapo"}
    weights = {(o.importance.kind, o.importance.level) for o in FEW_OPTIONS if o.importance}
    assert len(weights) == 4
    assert {o.kl.kind for o in FEW_OPTIONS if o.kl} == {"k1", "k2", "k3", "k1+", "k3+"}
    assert isinstance(FEW_OPTIONS[0], Options)
