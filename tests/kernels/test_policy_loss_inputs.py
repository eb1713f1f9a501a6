"""`policy_loss` as a torch op, and what it says to bad input."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from mrl.kernels import Clip, ImportanceWeight, KlPenalty, oracle, policy_loss, seq_logratio
from tests.kernels.policy_cases import FEW_OPTIONS, Options, make_case, run_op
from tests.release import only_in_release


def op_arguments(case, o: Options) -> tuple:
    captured = []
    op = torch.ops.mrl.policy_loss
    torch.ops.mrl.policy_loss = lambda *args: captured.append(args) or op(*args)
    try:
        policy_loss(**case.arguments(o))
    finally:
        torch.ops.mrl.policy_loss = op
    return captured[0]


@pytest.mark.parametrize(
    "o", only_in_release(FEW_OPTIONS, lambda o: o not in FEW_OPTIONS[::5]), ids=str
)
def test_opcheck(o) -> None:
    case = make_case([3, 0, 20])
    torch.library.opcheck(torch.ops.mrl.policy_loss.default, op_arguments(case, o))


def test_no_second_gradient() -> None:
    case, o = make_case([3, 20]), FEW_OPTIONS[4]
    leaf = case.logprobs.clone().requires_grad_()
    loss = policy_loss(**case.arguments(o) | {"logprobs": leaf}).loss
    (grad,) = torch.autograd.grad(loss * leaf.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_graph_where_no_gradient_is_wanted() -> None:
    case, o = make_case([3, 20]), FEW_OPTIONS[4]
    assert not policy_loss(**case.arguments(o)).loss.requires_grad
    leaf = case.logprobs.clone().requires_grad_()
    with torch.no_grad():
        assert not policy_loss(**case.arguments(o) | {"logprobs": leaf}).loss.requires_grad


def test_opcheck_seq_logratio() -> None:
    case = make_case([3, 0, 20])
    given = (case.logprobs, case.old_logprobs, case.loss_mask, case.cu_seqlens)
    torch.library.opcheck(torch.ops.mrl.seq_logratio.default, given)


def test_seq_logratio_matches_the_oracle() -> None:
    case = make_case([0, 1, 40, 100_000, 7], seed=3)
    given = (case.logprobs, case.old_logprobs, case.loss_mask, case.cu_seqlens)
    torch.testing.assert_close(
        seq_logratio(*given), oracle.seq_logratio(*given), rtol=1e-6, atol=1e-6
    )


@pytest.mark.usefixtures("compiles")
def test_compiled_code_calls_the_op() -> None:
    case, o = make_case([30, 40]), FEW_OPTIONS[4]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(leaf):
        result = policy_loss(**case.arguments(o) | {"logprobs": leaf * 1.0})
        return result.loss * 0.5

    leaf = case.logprobs.clone().requires_grad_()
    step(leaf).backward()
    assert torch.equal(leaf.grad, run_op(case, o).grad * 0.5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", torch.zeros(2, 5), r"logprobs: got shape [2, 5], expected [N]"),
        ("logprobs", torch.zeros(10).double(), "logprobs: got dtype torch.float64, expected"),
        ("old_logprobs", torch.zeros(9), "old_logprobs: got shape [9], expected [10]"),
        ("old_logprobs", torch.zeros(10, requires_grad=True), "old_logprobs: got a tensor that"),
        ("loss_mask", torch.ones(10), "loss_mask: got dtype torch.float32, expected torch.bool or"),
        ("loss_mask", torch.ones(9).bool(), "loss_mask: got shape [9], expected [10]"),
        ("advantages", torch.ones(3), "advantages: got shape [3], expected [2]"),
        ("seq_weight", torch.ones(2, device="meta"), "seq_weight: got device meta, expected cpu"),
        ("rollout_logprobs", torch.zeros(9), "rollout_logprobs: got shape [9], expected [10]"),
        ("ref_logprobs", torch.zeros(10).half(), "ref_logprobs: got dtype torch.float16, expected"),
        ("rollout_logprobs", None, "rollout_logprobs: got None, expected f32[N]"),
        ("ref_logprobs", None, "ref_logprobs: got None, expected f32[N]"),
        ("kl", None, "ref_logprobs: got a tensor, but kl is None"),
        ("seq_logratio", torch.zeros(3, 2), "seq_logratio: got shape [3, 2], expected [2, 2]"),
        (
            "seq_importance",
            torch.zeros(2, 2),
            "seq_importance: got a tensor, but nothing at sequence",
        ),
        ("cu_seqlens", torch.tensor([0]).int(), "cu_seqlens: got no sequence for 10 tokens"),
        ("cu_seqlens", torch.tensor([0, 4, 10]), "cu_seqlens: got dtype torch.int64, expected"),
        ("cu_seqlens", torch.tensor([]).int(), "cu_seqlens: got shape [0], expected [B+1]"),
        ("cu_seqlens", torch.tensor([0, 11, 10]).int(), "cu_seqlens: got 10 after 11 at index 2"),
        ("cu_seqlens", torch.tensor([0, 4, 9]).int(), "cu_seqlens[-1] = 9, expected the number"),
        ("cu_seqlens", torch.tensor([1, 4, 10]).int(), "cu_seqlens[0] = 1, expected 0"),
        ("ratio", "tokens", "ratio: got 'tokens', expected one of token, sequence"),
    ],
)
def test_bad_input_is_named(field, value, message) -> None:
    case = make_case([4, 6])
    arguments = case.arguments(FEW_OPTIONS[4]) | {field: value}
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_loss(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip("tanh"), "clip: got 'tanh', expected one of none, ppo, cispo, sapo"),
        (lambda: Clip(low=1.5), "clip.low: got 1.5, expected between 0 and 1"),
        (lambda: Clip(high=-0.1), "clip.high: got -0.1, expected at least 0"),
        (lambda: Clip(low=math.nan), "clip.low: got nan"),
        (lambda: Clip(dual=0.5), "clip.dual: got 0.5 with ppo"),
        (lambda: Clip("cispo", dual=3.0), "clip.dual: got 3.0 with cispo"),
        (lambda: Clip("sapo", tau_negative=0.0), "clip.tau_negative: got 0.0, expected above 0"),
        (
            lambda: ImportanceWeight("tiss", "token", 0.0, 2.0),
            "importance: got 'tiss', expected one of tis, mis",
        ),
        (
            lambda: ImportanceWeight("tis", "batch", 0.0, 2.0),
            "importance.level: got 'batch', expected one of",
        ),
        (
            lambda: ImportanceWeight("mis", "token", low=2.0, high=1.0),
            "importance: got the range [2.0, 1.0]",
        ),
        (lambda: KlPenalty("k4", 0.1), "kl: got 'k4', expected one of k1, k2, k3"),
        (lambda: KlPenalty("k1", math.nan), "kl.coef: got nan, expected a finite number"),
    ],
)
def test_bad_options_are_named(make, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_sums_over_ranks_are_given_for_everything_or_nothing() -> None:
    case, o = make_case([4, 6]), FEW_OPTIONS[6]
    assert (o.ratio, o.importance.level) == ("sequence", "sequence")
    sums = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"seq_importance: got None although the other one is given"
    ):
        policy_loss(**case.arguments(o), seq_logratio=sums)
    with pytest.raises(ValueError, match=r"seq_logratio: got None although the other one is given"):
        policy_loss(**case.arguments(o), seq_importance=sums)


def test_tokens_need_a_sequence() -> None:
    nothing = torch.tensor([0]).int()
    with pytest.raises(ValueError, match="cu_seqlens: got no sequence for 5 tokens"):
        seq_logratio(torch.zeros(5), torch.zeros(5), torch.ones(5).bool(), nothing)


def test_strided_inputs_are_read_right() -> None:
    case, o = make_case([30, 40]), FEW_OPTIONS[4]
    strided = replace(case, old_logprobs=torch.stack([case.old_logprobs] * 2, 1)[:, 0])
    assert not strided.old_logprobs.is_contiguous()
    assert torch.equal(run_op(strided, o).grad, run_op(case, o).grad)
