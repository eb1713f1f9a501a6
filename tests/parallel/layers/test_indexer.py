"""The indexer of sparse attention beside the paper's formula, one sequence at a time, in fp64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import parallel.context
from moe.keys import NO_KEYS, KeyReplay
from mrl.shared_prefixes import SharedPrefixes
from parallel import prepare
from parallel.context import context_slice
from parallel.layers import indexer as module
from parallel.layers.attention import PackedSequences, packed_sequences
from parallel.layers.indexer import Indexer, best_keys, with_chosen_keys
from parallel.layers.latent_attention import SparseAttention
from parallel.layers.rotary import Rotation

prepare()

HEADS, SIZE, ROTARY, TOPK, HIDDEN, LATENT = 4, 8, 4, 5, 12, 6
LENGTHS = [3, 17, 5, 6, 12]
GROUP: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def packed(lengths: list[int], shared: SharedPrefixes | None = None) -> PackedSequences:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    context = context_slice(bounds, GROUP, torch.device("cpu"), shared)
    return packed_sequences(bounds, context, torch.device("cpu"))


def angles(positions: Tensor) -> Tensor:
    """f64[n, r]: the angle of each rotated pair."""
    rates = 10.0 ** (-torch.arange(ROTARY // 2, dtype=torch.float64))
    return positions.double().unsqueeze(1) * rates


def rotation(found: PackedSequences) -> Rotation:
    assert found.positions is not None
    each = angles(found.positions).unsqueeze(1)
    return Rotation(each.cos().float(), each.sin().float())


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank by itself gathers nothing."""
    monkeypatch.setattr(
        parallel.context, "gather_from_sequence_parallel_region", lambda x, **options: x
    )


@pytest.fixture
def indexer() -> Indexer:
    torch.manual_seed(0)
    config = SimpleNamespace(
        dsa_indexer_topk=TOPK, dsa_indexer_n_heads=HEADS, dsa_indexer_head_dim=SIZE,
        q_lora_rank=LATENT, hidden_size=HIDDEN, params_dtype=torch.float32, sequence_parallel=False,
    )  # fmt: skip
    made = Indexer(config, GROUP)
    for buffer in made.buffers():
        torch.nn.init.normal_(buffer)
    return made


def inputs(num_tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, LATENT)


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first dimensions of x f64[T, h, d] as complex numbers."""
    pairs = x[..., :ROTARY]
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).mT
    angle = angles(torch.arange(len(x))).unsqueeze(1)
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat([turned, x[..., ROTARY:]], -1)


def scores(
    made: Indexer,
    hidden: Tensor,
    latent: Tensor,
    *,
    interleaved: bool = False,
    hadamard: bool = False,
) -> Tensor:
    """f64[T, T]: the scores of eq. 1 for one sequence, -inf for keys that come later."""
    hidden, latent = hidden.double(), latent.double()
    weights = {name: buffer.double() for name, buffer in made.named_buffers()}
    query = (latent @ weights["query_weight"].T).unflatten(-1, (HEADS, SIZE))
    norm = weights["key_norm_weight"], weights["key_norm_bias"]
    key = F.layer_norm(hidden @ weights["key_weight"].T, (SIZE,), *norm, 1e-6).unsqueeze(1)
    query, key = rotate(query, interleaved), rotate(key, interleaved)[:, 0]
    if hadamard:
        matrix = torch.ones(1, 1).double()
        while len(matrix) < SIZE:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        query, key = (x @ matrix / SIZE**0.5 for x in (query, key))
    found = torch.zeros(len(hidden), len(hidden)).double()
    for head in range(HEADS):
        gate = hidden @ weights["head_weight"][head] * HEADS**-0.5 * SIZE**-0.5
        found += gate.unsqueeze(1) * F.relu(query[:, head] @ key.T)
    return found.masked_fill(torch.ones_like(found).triu(1).bool(), float("-inf"))


def by_formula(made: Indexer, hidden: Tensor, latent: Tensor, **options: bool) -> list[set[int]]:
    """The keys that each query of one sequence sees; among equal scores, of which ReLU gives many, the
    first."""
    found = scores(made, hidden, latent, **options).sort(descending=True, stable=True).indices
    return [set(row[: min(TOPK, number + 1)].tolist()) for number, row in enumerate(found)]


def sets(chosen: Tensor, lengths: list[int]) -> list[list[set[int]]]:
    return [
        [set(row.tolist()) if row[0] >= 0 else set(range(n + 1)) for n, row in enumerate(part)]
        for part in chosen.split(lengths)
    ]


def test_the_choice_is_that_of_the_formula_in_each_packed_sequence(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, (hidden, latent) = packed(LENGTHS), inputs(sum(LENGTHS))
    chosen = indexer(hidden, latent, found, rotation(found))
    assert chosen is not None
    parts = list(zip(hidden.split(LENGTHS), latent.split(LENGTHS), strict=True))
    assert sets(chosen, LENGTHS) == [by_formula(indexer, *part) for part in parts]
    assert sets(chosen, LENGTHS) == [by_formula(indexer, *part, hadamard=True) for part in parts]
    # The first public release rotated the pairs 2i and 2i+1 here, which chooses other keys.
    assert sets(chosen, LENGTHS) != [by_formula(indexer, *part, interleaved=True) for part in parts]
    own = found.positions
    assert own is not None
    assert ((chosen[:, 0] == NO_KEYS) == (own < TOPK)).all()  # they see all keys
    assert (chosen.diff(dim=1)[own >= TOPK] > 0).all()  # ascending
    monkeypatch.setattr(module, "MAX_SCORES", 1)  # one query at a time
    assert torch.equal(indexer(hidden, latent, found, rotation(found)), chosen)


def test_short_sequences_need_no_choice(indexer: Indexer) -> None:
    found, (hidden, latent) = packed([5, 2]), inputs(7)
    assert indexer(hidden, latent, found, rotation(found)) is None


def test_a_shared_prefix_changes_no_choice(indexer: Indexer) -> None:
    hidden, latent = inputs(14)
    other = inputs(3)
    both = [torch.cat([x, x[:11], y]) for x, y in zip((hidden, latent), other, strict=True)]
    plain = packed([14, 14])
    chosen = indexer(*both, plain, rotation(plain))
    shared = packed([14, 14], SharedPrefixes((0, 0), (0, 11)))
    rows = torch.tensor([*range(14), *range(25, 28)])
    ours = indexer(*(x[rows] for x in both), shared, rotation(shared))
    assert torch.equal(ours, chosen[rows])


def test_among_equal_scores_the_first_keys_win() -> None:
    given = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0, 0.0], [1.0] * 6, [5.0, 4, 3, 2, 1, 0]])
    assert best_keys(given, 3).tolist() == [[0, 1, 4], [0, 1, 2], [0, 1, 2]]
    drawn = torch.randn(50, 40)
    expected = drawn.topk(7).indices.sort(1).values
    assert torch.equal(best_keys(drawn, 7), expected.int())


def test_a_replayed_choice_stays_as_it_is(indexer: Indexer) -> None:
    found, (hidden, latent) = packed(LENGTHS), inputs(sum(LENGTHS))
    target = indexer(hidden, latent, found, rotation(found))
    own, other = target.clone(), torch.tensor([0, 1, 2, 3, 4])
    target[10] = other  # position 7 of the sequence of 17 tokens
    assert not torch.equal(own, target)
    indexer.replay = KeyReplay(False)
    indexer.replay.begin_forward(target.to(torch.int16), with_grad=False, records=True)
    replayed = indexer(hidden, latent, found, rotation(found))
    assert replayed.dtype == torch.int32
    assert torch.equal(replayed, target)
    assert indexer.replay.recorded is not None
    assert torch.equal(indexer.replay.recorded.int(), target)
    indexer.replay.begin_forward(target[:-1], with_grad=False)
    with pytest.raises(ValueError, match=r"this rank has \(43, 5\) .* choice is \(42, 5\)"):
        indexer(hidden, latent, found, rotation(found))


def test_scores_that_are_not_finite_still_give_a_choice(indexer: Indexer) -> None:
    found, (hidden, latent) = packed([9]), inputs(9)
    hidden[4] = float("nan")
    chosen = indexer(hidden, latent, found, rotation(found))
    assert chosen.shape == (9, TOPK)
    assert (chosen <= torch.arange(9).unsqueeze(1)).all()


@pytest.mark.parametrize("shared", [None, SharedPrefixes((0, 1, 1), (0, 0, 11))])
def test_attention_sees_the_chosen_keys_and_no_others(shared: SharedPrefixes | None) -> None:
    """With gradients; also for the rows after a shared prefix."""
    lengths, heads, size = [4, 14, 16], 2, 3
    found = packed(lengths, shared)
    bounds, rows = [0, 4, 18, 34], torch.arange(34)
    if shared is not None:
        rows = torch.cat([rows[:18], rows[29:]])
    chosen = torch.full((34, TOPK), NO_KEYS, dtype=torch.int32)
    for start, length in zip(bounds, lengths, strict=False):
        for own in range(TOPK, length):
            chosen[start + own] = torch.randperm(own + 1)[:TOPK].int()
    full = [torch.randn(34, heads, size, dtype=torch.float64) for _ in range(3)]
    if shared is not None:
        chosen[18:29] = chosen[4:15]
        for x in full:
            x[18:29] = x[4:15]
    given = [x[rows].clone().requires_grad_() for x in full]
    config = SimpleNamespace(attention_dropout=0.0)
    attention = SparseAttention(config, 1, None, "self")
    found.chosen_keys[1] = chosen[rows]
    ours = attention(*given, packed_seq_params=found).unflatten(1, (heads, size))
    query, key, value = (x.requires_grad_() for x in full)
    expected = torch.zeros_like(query)
    for start, length in zip(bounds, lengths, strict=False):
        for own in range(length):
            seen = chosen[start + own].tolist() if own >= TOPK else range(own + 1)
            places = torch.tensor(sorted(seen)) + start
            logits = torch.einsum("hd,khd->hk", query[start + own], key[places]) * size**-0.5
            expected[start + own] = torch.einsum("hk,khd->hd", logits.softmax(-1), value[places])
    assert (ours - expected[rows]).abs().max() < 1e-12
    weight = torch.randn_like(ours)
    gradients = torch.autograd.grad((ours * weight).sum(), given)
    wanted = torch.autograd.grad((expected[rows] * weight).sum(), [query, key, value])
    for ours_, theirs in zip(gradients, wanted, strict=True):
        if shared is not None:  # a shared row has the gradients of all of its tokens
            theirs[4:15] += theirs[18:29]
        assert (ours_ - theirs[rows]).abs().max() < 1e-12
    masks = with_chosen_keys(found, chosen[rows])
    assert any(bucket.mask is None for bucket in masks)  # the sequence of 4 tokens
