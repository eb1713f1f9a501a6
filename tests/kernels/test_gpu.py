"""The CUDA kernels on a GPU, against the CPU kernels: values, bits, graphs, launches, no waiting.

Skipped, by name, where there is none; test_cuda_emulated.py runs the same source there.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from moe.align import local_routes, take_bytes
from mrl import _C
from mrl.kernels import (
    dequantize_fp8_blocks,
    dequantize_int8_channels,
    fake_quantize_fp8_groups,
    fake_quantize_int8_tokens,
    moe_ids,
    moe_permute,
    moe_sort,
    moe_unpermute,
    packed_gae,
    policy_loss,
    quantize_fp8_blocks,
    quantize_int8_channels,
    seq_logratio,
    vp_logprob,
)
from mrl.types import TokenRoutes
from tests.kernels.block_quant_cases import KINDS, assert_bits, make
from tests.kernels.policy_cases import (
    ALL_OPTIONS,
    FEW_OPTIONS,
    Case,
    assert_close,
    make_case,
    run_op,
    select,
    with_garbage,
)
from tests.kernels.test_vp_logprob import DTYPES, make_logits, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _C.has_cuda),
        reason="needs a CUDA device and mrl._C built with MRL_CUDA=1",
    ),
]
LENGTHS = [40, 0, 1, 1030, 17, 2050, 33]


def on_gpu(case: Case) -> Case:
    moved = {f.name: getattr(case, f.name) for f in fields(case)}
    return replace(case, **{k: v.cuda() for k, v in moved.items() if isinstance(v, Tensor)})


def run_on_gpu(case: Case, o):
    result = run_op(on_gpu(case), o)
    return type(result)(**{name: value.cpu() for name, value in vars(result).items()})


@pytest.mark.parametrize("o", ALL_OPTIONS, ids=str)
def test_policy_loss_matches_the_cpu(o) -> None:
    for token_advantages in (False, True):
        case = make_case(LENGTHS, seed=7, token_advantages=token_advantages)
        assert_close(run_on_gpu(case, o), run_op(case, o))


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
def test_policy_loss_bits(o) -> None:
    case = make_case(LENGTHS * 20, seed=3)
    whole = run_on_gpu(case, o)
    order = torch.randperm(len(case.lengths), generator=torch.Generator().manual_seed(0)).tolist()
    mixed = run_on_gpu(select(case, order), o)
    dirty = run_on_gpu(with_garbage(case, torch.nan), o)
    grads = whole.grad.split(case.lengths)
    assert torch.equal(mixed.grad, torch.cat([grads[i] for i in order]))
    assert torch.equal(mixed.seq_stats, whole.seq_stats[order])
    assert torch.equal(mixed.stats, whole.stats)
    assert torch.equal(dirty.grad, whole.grad)
    assert torch.equal(dirty.stats, whole.stats)


def test_policy_loss_of_a_long_sequence() -> None:
    case = make_case([3, 100_000, 50], seed=1)
    assert_close(run_on_gpu(case, FEW_OPTIONS[-1]), run_op(case, FEW_OPTIONS[-1]))


def test_seq_logratio_matches_the_cpu() -> None:
    case = make_case(LENGTHS, seed=7)
    names = ("logprobs", "old_logprobs", "loss_mask", "cu_seqlens")
    given = [getattr(case, name) for name in names]
    got = seq_logratio(*(x.cuda() for x in given)).cpu()
    torch.testing.assert_close(got, seq_logratio(*given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 100, 4748, 32_768, 151_936])
def test_vp_logprob_matches_the_cpu(dtype, columns) -> None:
    logits, labels = make_logits(6, columns, dtype)
    mask = torch.tensor([True, True, False, True, True, True])
    cpu = run(logits, labels, mask, temperature=0.7)
    got = run_vp_on_gpu(logits, labels, mask, temperature=0.7)
    step = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(dtype, 0.0)
    for a, b in zip(got, cpu, strict=True):
        scale = step * float(b.abs().max()) if b.dim() == 2 else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=1e-5 + scale)


def run_vp_on_gpu(logits, labels, mask, **options) -> list[Tensor]:
    from tests.kernels.test_vp_logprob import upstream

    leaf = logits.cuda().requires_grad_()
    logprobs, entropy = vp_logprob(leaf, labels.cuda(), mask.cuda(), **options)
    g, g_entropy = (x.cuda() for x in upstream(len(labels)))
    (grad,) = torch.autograd.grad((g * logprobs + g_entropy * entropy).sum(), leaf)
    return [x.detach().cpu() for x in (logprobs, entropy, grad)]


def test_packed_gae_matches_the_cpu() -> None:
    case = make_case(LENGTHS, seed=7)
    given = (case.logprobs, case.old_logprobs, case.loss_mask, case.cu_seqlens)
    cpu = packed_gae(*given, gamma=0.99, lam=0.95)
    for a, b in zip(packed_gae(*(x.cuda() for x in given), gamma=0.99, lam=0.95), cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-6)


def test_routes_match_the_cpu() -> None:
    """uint16 has few operations on GPUs: these are the ones that routes go through."""
    rng = torch.Generator().manual_seed(0)
    for num_experts, dtype in ((100, torch.uint8), (600, torch.uint16)):
        ids = torch.rand(40, 3, num_experts, generator=rng).topk(8).indices.to(dtype)
        captured, index = torch.arange(40) != 3, torch.randperm(40, generator=rng)
        routes = TokenRoutes(ids, captured, (1, 2, 3), num_experts)
        moved = TokenRoutes(ids.cuda(), captured.cuda(), (1, 2, 3), num_experts)
        for layers in ((2, 3), (3, 1)):
            found = local_routes(moved, layers, 1, 2)
            for number, expected in local_routes(routes, layers, 1, 2).items():
                assert torch.equal(found[number].cpu(), expected)
        taken = take_bytes(moved.expert_ids, index.cuda())
        assert torch.equal(taken.cpu(), take_bytes(ids, index))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_moe_permute_has_the_bits_of_the_cpu_and_of_a_second_run(dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    chosen = torch.rand(3000, 64, generator=rng).topk(8).indices
    chosen = torch.zeros(3000, 64, dtype=torch.bool).scatter_(1, chosen, True)
    rows = torch.randn(3000, 264, generator=rng).to(dtype)
    table = torch.rand(3000, 64, generator=rng)

    def run(device: str) -> list[Tensor]:
        order = moe_sort(moe_ids(chosen.to(device), 8), 64)
        leaves = [x.to(device).requires_grad_() for x in (rows, table)]
        copies, gates = moe_permute(leaves[0], order, leaves[1])
        summed = moe_unpermute(copies, order)
        outputs = [summed, gates]
        grads = torch.autograd.grad(outputs, leaves, [leaves[0].detach(), gates.detach()])
        return [x.detach().cpu() for x in (*order, copies, *outputs, *grads)]

    cpu, first, second = run("cpu"), run("cuda"), run("cuda")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, cpu, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_block_quant_has_the_bits_of_the_cpu(dtype, kind) -> None:
    """(640, 1536) is read in fours, (300, 1031) one by one; a second quantisation changes nothing."""
    for number, shape in enumerate(((640, 1536), (300, 1031))):
        x = make(kind, shape, dtype, number)

        def run(x: Tensor) -> list[Tensor]:
            found = [fake_quantize_fp8_groups(x), fake_quantize_int8_tokens(x)]
            for powers_of_two in (False, True):
                made = quantize_fp8_blocks(x, powers_of_two=powers_of_two)
                found += [*made, *(dequantize_fp8_blocks(*made, to) for to in DTYPES)]
                wide = dequantize_fp8_blocks(*made, torch.float32)
                found += quantize_fp8_blocks(wide, powers_of_two=powers_of_two)
                assert torch.equal(found[-2].view(torch.uint8), made[0].view(torch.uint8))
                assert torch.equal(found[-1], made[1])
            made = quantize_int8_channels(x)
            return [*found, *made, *(dequantize_int8_channels(*made, to) for to in DTYPES)]

        for got, expected in zip(run(x.cuda()), run(x), strict=True):
            assert_bits(got.cpu(), expected)


def test_block_quant_sees_what_is_not_finite() -> None:
    x = make("normal", (300, 1031), torch.bfloat16, 0)
    x[140, 1030] = torch.nan
    with pytest.raises(ValueError, match=r"got nan at \[140, 1030\]"):
        quantize_fp8_blocks(x.cuda(), powers_of_two=True)
    for fake_quantize in (fake_quantize_fp8_groups, fake_quantize_int8_tokens):
        assert_bits(fake_quantize(x.cuda()).cpu(), fake_quantize(x))


def test_policy_loss_takes_two_launches_and_never_waits() -> None:
    case, o = on_gpu(make_case([2048] * 64, seed=1)), FEW_OPTIONS[4]
    run_op(case, o)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            policy_loss(**case.arguments(o))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.key for event in profile.key_averages()]
    assert sum("Policy" in name for name in names) == 2


def test_a_cuda_graph_captures_loss_and_gradient() -> None:
    case, o = on_gpu(make_case(LENGTHS, seed=1)), FEW_OPTIONS[4]
    leaf = case.logprobs.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a warm-up, as capture demands
        torch.autograd.grad(policy_loss(**case.arguments(o) | {"logprobs": leaf}).loss, leaf)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = policy_loss(**case.arguments(o) | {"logprobs": leaf}).loss
        (grad,) = torch.autograd.grad(loss, leaf)
    with torch.no_grad():
        leaf += 0.01
    graph.replay()
    expected = run_op(replace(case, logprobs=leaf.detach()), o)
    assert torch.equal(grad, expected.grad)
    assert torch.equal(loss.detach(), expected.loss)
