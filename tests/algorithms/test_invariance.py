"""The one invariant: however a step is split, its loss and gradient are those of the definition.

Every algorithm of the folder, any options, any split of the step into data-parallel ranks and
micro-batches, sequences cut between context-parallel ranks, any packing order, padding and dropped
samples, against one fp64 run over the whole step.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mrl.algorithms import check_algorithm, list_algorithms, load_algorithm, traits
from mrl.config import AlgorithmConfig, MaskConfig
from parallel.context import blocks_of_rank
from tests.algorithms import oracle
from tests.algorithms.cases import Drawn, draw, nll_weights, pack, padded, sequence_weights

MASKS = (
    MaskConfig(name="token_mask", low=0.8, high=1.3),
    MaskConfig(name="sequence_mask", low=0.9, high=1.1),
    MaskConfig(name="opsm", high=0.02),
    MaskConfig(name="dppo", low=0.02, high=0.03),
)
OPTIONS = st.fixed_dictionaries(
    {
        "aggregation": st.sampled_from(
            [
                None,
                "token_mean",
                "seq_mean_token_mean",
                "seq_mean_token_sum",
                "seq_mean_token_sum_norm",
            ]
        ),
        "importance": st.sampled_from(["none", "tis", "mis"]),
        "importance_level": st.sampled_from(["token", "sequence"]),
        "masks": st.lists(st.sampled_from(MASKS), unique=True, max_size=4).map(tuple),
        "kl_coef": st.sampled_from([0.0, 0.1]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3", "k1+", "k3+", "k3_unbiased"]),
        "clip_low": st.sampled_from([None, 0.1]),
        "clip_high": st.sampled_from([None, 0.15]),
        "dual_clip": st.sampled_from([None, 1.3]),
        "proximal_at_no_lag": st.sampled_from(["rollout", "policy"]),
    }
)


EXAMPLES = 40 if os.environ.get("MRL_TEST_REAL_STARTS") == "1" else 8
"""The number of drawn cases of each algorithm; `make test-all` draws more."""
_NOT_FOR_ALL = ("clip_low", "clip_high", "dual_clip", "proximal_at_no_lag")


def test_every_algorithm_has_a_definition_to_be_compared_with() -> None:
    """A new file in mrl/algorithms needs a line in tests/algorithms/oracle.py."""
    assert set(list_algorithms()) == set(oracle.RULES)


def readable(name: str, options: dict) -> AlgorithmConfig:
    """The options that the algorithm reads."""
    reads = traits(load_algorithm(name)).reads or ()
    left_out = [key for key in _NOT_FOR_ALL if key not in reads]
    if not options["kl_coef"]:
        left_out.append("kl_estimator")
    config = AlgorithmConfig(name=name, **{k: v for k, v in options.items() if k not in left_out})
    check_algorithm(config)
    return config


def on_context_ranks(
    loss: Callable[[torch.Tensor], torch.Tensor],
    logprobs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cp: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient [N] where each of `cp` ranks computed the log-probs of its blocks.

    As parallel/logprobs.py does it: every rank has the log-probs of all, in packed order, and the
    gradient of its own. (The collective itself is in tests/parallel/test_context.py.)
    """
    bounds = cu_seqlens.tolist()
    held = [torch.arange(len(logprobs))]
    if cp > 1:
        ranks = [blocks_of_rank(bounds, rank, cp) for rank in range(cp)]
        held = [torch.cat([block.packed for block in blocks]) for blocks in ranks]
    places = torch.cat(held).argsort()
    values, grad = [], torch.empty_like(logprobs)
    for rank in range(cp):
        slices = [logprobs.detach()[index] for index in held]
        own = slices[rank].requires_grad_()
        value = loss(torch.cat(slices)[places])
        (grad[held[rank]],) = torch.autograd.grad(value, own)
        values.append(value.detach())
    assert all(value == values[0] for value in values)
    return values[0], grad


def run(
    name: str,
    drawn: list[Drawn],
    split: list[list[int]],
    config: AlgorithmConfig,
    *,
    padding: int,
    cp: int,
):
    """Loss and gradient by sequence, added up over the micro-batches of all ranks."""
    weights, nll = sequence_weights(name, drawn, config), nll_weights(name, drawn, config)
    if cp > 1:  # the packer's lengths
        drawn, padding = [padded(d, 2 * cp) for d in drawn], padding * 2 * cp
    algorithm = load_algorithm(name)
    total = torch.zeros((), dtype=torch.float64)
    grads: list[torch.Tensor] = [torch.empty(0)] * len(drawn)
    for members in split:
        chosen = [drawn[i] for i in members]
        own = None if nll is None else nll[members]
        logprobs, batch = pack(name, chosen, weights[members], own, padding)
        value, grad = on_context_ranks(
            lambda gathered, batch=batch: algorithm.loss(gathered, batch, config).loss_sum,
            logprobs,
            batch.cu_seqlens,
            cp,
        )
        total += value
        parts = grad.split([*(len(d) for d in chosen), *([padding] if padding else [])])
        for i, part in zip(members, parts, strict=False):
            grads[i] = part
        if padding:
            assert not parts[-1].any()
    return total, grads


@pytest.mark.parametrize("name", list_algorithms())
@given(
    data=st.data(),
    lengths=st.lists(st.sampled_from([2, 3, 5, 9, 17, 31]), min_size=1, max_size=7),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1e-3, 0.1, 0.5]),
    options=OPTIONS,
    padding=st.sampled_from([0, 3]),
    cp=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_split_is_the_definition(
    name, data, lengths, seed, scale, options, padding, cp
) -> None:
    rng = torch.Generator().manual_seed(seed)
    dropped = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    drawn = [
        draw(n, rng, scale=scale, dropped=out and i > 0)
        for i, (n, out) in enumerate(zip(lengths, dropped, strict=True))
    ]
    order = data.draw(st.permutations(range(len(drawn))))
    cuts = data.draw(st.lists(st.integers(0, len(drawn)), max_size=4).map(sorted))
    split = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(drawn)], strict=True)]
    config = readable(name, options)
    expected = oracle.loss(name, drawn, config)
    assume(expected.margin > 3e-6)  # else fp32 may see a ratio on the other side of its bound

    split = [members for members in split if members]
    total, grads = run(name, drawn, split, config, padding=padding, cp=cp)
    torch.testing.assert_close(total, expected.value, rtol=2e-5, atol=2e-6)
    largest = max(float(g.abs().max()) for g in expected.grads)
    for got, wanted in zip(grads, expected.grads, strict=True):
        assert not got[len(wanted) :].any()  # what fills the sequence up to the packer's length
        torch.testing.assert_close(
            got[: len(wanted)].double(), wanted, rtol=2e-5, atol=2e-6 * largest + 1e-12
        )
