"""The update of one linear layer against the plain formula, whatever Megatron joined in the layer."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import prepare

prepare()

from parallel.architectures.base import Split  # noqa: E402
from parallel.lora.layers import LowRank, Switch, Update  # noqa: E402

RANK, INPUTS, SCALE, GROUPS, HEADS_PER_GROUP, HEAD = 3, 10, 2.5, 2, 3, 4
QUERY, KEY = GROUPS * HEADS_PER_GROUP * HEAD, GROUPS * HEAD
LAYERS: dict[Split, dict[str, int]] = {
    "qkv": {"q_proj": QUERY, "k_proj": KEY, "v_proj": KEY},
    "gated_qkv": {"q_proj": 2 * QUERY, "k_proj": KEY, "v_proj": KEY},
    "gated": {"gate_proj": 6, "up_proj": 6},
    "columns": {"o_proj": 7},
}
"""The weights of a layer and the rows of each."""
SUBSETS = [
    (split, names)
    for split, sizes in LAYERS.items()
    for count in range(1, len(sizes) + 1)
    for names in itertools.combinations(sizes, count)
]


def make_part(outputs: int) -> LowRank:
    part = LowRank()
    part.A = torch.nn.Parameter(torch.randn(RANK, INPUTS))
    part.B = torch.nn.Parameter(torch.randn(outputs, RANK))
    return part


def make_update(split: Split, adapted: tuple[str, ...]) -> tuple[Update, dict[str, Tensor]]:
    """An update of `adapted`, and scale B A of each weight of the layer by the plain formula."""
    torch.manual_seed(0)
    sizes = LAYERS[split]
    update = Update(split, list(sizes.values()), GROUPS, SCALE, Switch())
    expected = {name: torch.zeros(rows, INPUTS) for name, rows in sizes.items()}
    for number, (name, rows) in enumerate(sizes.items()):
        if name in adapted:
            part = make_part(rows)
            assert part.A is not None
            assert part.B is not None
            update.add(number, name, part, None)
            expected[name] = SCALE * part.B.detach() @ part.A.detach()
    return update, expected


def by_hand(split: Split, weights: dict[str, Tensor]) -> Tensor:
    """The rows of Megatron's layer, one group of queries after the other, or gate before up. In the
    Hugging Face weight, each head's query is before its output gate, if it has one."""
    if split not in ("qkv", "gated_qkv"):
        return torch.cat(list(weights.values()))
    rows, each = [], 2 if split == "gated_qkv" else 1
    for group in range(GROUPS):
        for kind in range(each):
            for head in range(group * HEADS_PER_GROUP, (group + 1) * HEADS_PER_GROUP):
                first = (each * head + kind) * HEAD
                rows.append(weights["q_proj"][first : first + HEAD])
        for name in ("k_proj", "v_proj"):
            rows.append(weights[name][group * HEAD : (group + 1) * HEAD])
    return torch.cat(rows)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() < 2e-5)


@pytest.mark.parametrize(("split", "adapted"), SUBSETS)
def test_an_update_is_that_of_the_formula(split: Split, adapted: tuple[str, ...]) -> None:
    update, expected = make_update(split, adapted)
    x = torch.randn(5, 1, INPUTS)
    whole = by_hand(split, expected)
    assert close(update(x), F.linear(x, whole))
    assert close(update.matrix(), whole)
    weight = torch.randn_like(whole)
    assert close(F.linear(x, weight) + update(x), F.linear(x, weight + update.matrix()))
    # A part without an update has no parameters, and exact zeros as its share.
    assert {name.partition(".")[0] for name, _ in update.named_parameters()} == set(adapted)
    without = {name: torch.ones_like(one) * (name not in adapted) for name, one in expected.items()}
    assert not update(x)[..., by_hand(split, without)[:, 0].bool()].any()


@pytest.mark.parametrize(("split", "adapted"), SUBSETS)
def test_gradients_are_those_of_the_formula(split: Split, adapted: tuple[str, ...]) -> None:
    update, _ = make_update(split, adapted)
    x = torch.randn(5, INPUTS, requires_grad=True)
    parameters = dict(update.named_parameters())
    weights = {
        name: SCALE * parameters[f"{name}.B"] @ parameters[f"{name}.A"]
        if name in adapted
        else torch.zeros(rows, INPUTS)
        for name, rows in LAYERS[split].items()
    }
    inputs = [x, *parameters.values()]
    theirs = F.linear(x, by_hand(split, weights))
    towards = torch.randn_like(theirs)
    pairs = zip(
        torch.autograd.grad(update(x), inputs, towards),
        torch.autograd.grad(theirs, inputs, towards),
        strict=True,
    )
    for ours, other in pairs:
        assert (ours - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize("matrix", ["A", "B"])
def test_a_shared_matrix_is_used_and_is_not_the_updates_own(matrix: str) -> None:
    whole, expected = make_update("columns", ("o_proj",))
    part, shared = whole._parts[0], LowRank()
    assert part is not None
    setattr(shared, matrix, getattr(part, matrix))
    setattr(part, matrix, None)
    update = Update("columns", list(LAYERS["columns"].values()), GROUPS, SCALE, Switch())
    update.add(0, "o_proj", part, shared)
    x = torch.randn(5, INPUTS)
    assert close(update(x), F.linear(x, expected["o_proj"]))
    assert close(update.matrix(), expected["o_proj"])
    own = {"A": "B", "B": "A"}[matrix]
    assert [name for name, _ in update.named_parameters()] == [f"o_proj.{own}"]
    assert update.is_shared(0, matrix)
    assert not update.is_shared(0, own)


def fails_while_it_is_off(switch: Switch) -> None:
    with switch.off():
        assert not switch.is_on
        raise KeyError("of the caller")


def test_a_switch_is_on_again_whatever_happened() -> None:
    switch = Switch()
    with pytest.raises(KeyError):
        fails_while_it_is_off(switch)
    assert switch.is_on
