import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.cursor import PromptCursor
from mrl.data.reader import Source
from mrl.errors import InputError
from mrl.types import Prompt


def prompts(n, answer=0):
    return [Prompt(str(i), torch.tensor([i]), f"p{i}", {"answer": answer}, f"f:{i}")
            for i in range(n)]  # fmt: skip


def ids(batch):
    return [prompt.prompt_id for prompt in batch]


@given(
    size=st.integers(1, 20),
    batches=st.lists(st.integers(0, 30), max_size=12),
    stop=st.integers(0, 12),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_resume_at_any_point_gives_the_same_sequence(size, batches, stop, seed, shuffle):
    whole = PromptCursor(prompts(size), seed=seed, shuffle=shuffle)
    expected = [ids(whole.next(n)) for n in batches]
    first = PromptCursor(prompts(size), seed=seed, shuffle=shuffle)
    got = [ids(first.next(n)) for n in batches[:stop]]
    second = PromptCursor(prompts(size), seed=seed + 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [ids(second.next(n)) for n in batches[stop:]]
    assert got == expected
    assert second.state_dict() == whole.state_dict()


@given(size=st.integers(1, 20), epochs=st.integers(1, 4), n=st.integers(1, 7))
def test_every_epoch_deals_every_prompt_once(size, epochs, n):
    cursor = PromptCursor(prompts(size), seed=3)
    dealt = []
    while len(dealt) < size * epochs:
        dealt += ids(cursor.next(min(n, size * epochs - len(dealt))))
    for epoch in range(epochs):
        counts = Counter(dealt[epoch * size : (epoch + 1) * size])
        assert counts == Counter(str(i) for i in range(size))
    assert cursor.epoch == epochs


def test_order_depends_on_seed_and_epoch_only():
    a, b, c = (PromptCursor(prompts(50), seed=seed) for seed in (1, 1, 2))
    first, second = ids(a.next(50)), ids(a.next(50))
    assert first != second
    assert ids(b.next(100)) == first + second
    assert ids(c.next(50)) != first
    assert ids(PromptCursor(prompts(5), seed=1, shuffle=False).next(7)) == list("0123401")


def test_state_of_other_data_is_refused():
    state = PromptCursor(prompts(5), seed=0).state_dict()
    with pytest.raises(InputError, match="made with 5 prompts, the data file has 6"):
        PromptCursor(prompts(6), seed=0).load_state_dict(state)
    with pytest.raises(InputError, match="not those of the checkpoint"):
        PromptCursor(prompts(5, answer=1), seed=0).load_state_dict(state)
    with pytest.raises(InputError, match="no prompts"):
        PromptCursor([], seed=0)


def source(name, n, weight=None, answer=0):
    rows = [Prompt(f"{name}{i}", torch.tensor([i]), f"{name}{i}", {"answer": answer}, f"{name}:{i}")
            for i in range(n)]  # fmt: skip
    return Source(name, rows, weight, ("`prompt` (string)",))


WEIGHTS = st.lists(st.floats(0.01, 10), min_size=2, max_size=4)


@given(
    weights=WEIGHTS,
    batches=st.lists(st.integers(0, 30), max_size=12),
    stop=st.integers(0, 12),
    seed=st.integers(0, 2**40),
)
def test_a_mixture_resumes_to_the_row(weights, batches, stop, seed):
    sources = [source("abcd"[i], 3 + 4 * i, weight) for i, weight in enumerate(weights)]
    whole = PromptCursor(sources, seed=seed)
    expected = [ids(whole.next(n)) for n in batches]
    first = PromptCursor(sources, seed=seed)
    got = [ids(first.next(n)) for n in batches[:stop]]
    second = PromptCursor(sources, seed=seed + 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [ids(second.next(n)) for n in batches[stop:]]
    assert got == expected
    assert second.state_dict() == whole.state_dict()


@given(weights=WEIGHTS, n=st.integers(1, 200))
def test_every_draw_keeps_the_shares(weights, n):
    """Smooth weighted round-robin: with k sources, no source is ever k prompts from its share."""
    sources = [source("abcd"[i], 5, weight) for i, weight in enumerate(weights)]
    counts = Counter(name[0] for name in ids(PromptCursor(sources, seed=1).next(n)))
    for each in sources:
        assert abs(counts[each.name] - n * each.weight / sum(weights)) < len(sources)


def test_a_mixture_deals_each_source_once_an_epoch():
    cursor = PromptCursor([source("a", 6, 3), source("b", 2, 1)], seed=0)
    dealt = ids(cursor.next(8))
    assert sorted(dealt) == [*(f"a{i}" for i in range(6)), "b0", "b1"]
    assert cursor.epoch == 1
    assert [name[0] for name in dealt] == list("aabaaaba")
    other = PromptCursor([source("a", 6, 3), source("b", 2, 1)], seed=1)
    assert ids(other.next(8)) != dealt


def test_sources_without_weights_are_one_data_set():
    """Also for the states of checkpoints from before there were sources."""
    whole = [*source("a", 4).prompts, *source("b", 3).prompts]
    old, new = PromptCursor(whole, seed=5), PromptCursor([source("a", 4), source("b", 3)], seed=5)
    old.next(3)
    state = old.state_dict()
    assert state.keys() == {"seed", "shuffle", "epoch", "offset", "num_prompts", "sha256"}
    new.load_state_dict(state)
    assert ids(new.next(20)) == ids(old.next(20))


def test_the_state_of_a_checkpoint_from_before_there_were_mixtures():
    """Written by mrl before sources; the digest is that of the prompts p0 ... p4."""
    cursor = PromptCursor([Source("one", prompts(5), None, ())], seed=9)
    cursor.load_state_dict({
        "seed": 0, "shuffle": True, "epoch": 2, "offset": 3, "num_prompts": 5,
        "sha256": "66838dc3ff7e9c7bf9add2598679ba166e349c089781bdb6b363669baecf9845",
    })  # fmt: skip
    assert ids(cursor.next(4)) == ["0", "2", "2", "4"]


def test_a_changed_source_is_named():
    sources = [source("a", 4, 1), source("b", 3, 1)]
    for weight in (1, None):
        mine = [source("a", 4, weight), source("b", 3, weight)]
        state = PromptCursor(mine, seed=0).state_dict()
        changed = [source("a", 4, weight), source("b", 3, weight, answer=1)]
        with pytest.raises(InputError, match="the 3 prompts of the source b are not the 3 of the"):
            PromptCursor(changed, seed=0).load_state_dict(state)
    state = PromptCursor(sources, seed=0).state_dict()
    assert (
        PromptCursor(changed, seed=0).why_other(state).startswith("the checkpoint was made with a")
    )
    assert PromptCursor(sources, seed=0, shuffle=False).why_other(state) == "data.shuffle was true"
    assert PromptCursor(sources, seed=0).why_other(state) == ""
    with pytest.raises(InputError, match="made with the sources a, b, the recipe has a, c"):
        PromptCursor([source("a", 4, 1), source("c", 3, 1)], seed=0).load_state_dict(state)
    with pytest.raises(
        InputError, match="made with a mixture with weights, the recipe has one data"
    ):
        PromptCursor(prompts(7), seed=0).load_state_dict(state)
    # The order of the sources in the recipe is free, and so are their weights.
    cursor = PromptCursor([source("b", 3, 5), source("a", 4, 1)], seed=0)
    cursor.load_state_dict(state)
    assert cursor.state_dict()["mixture"][0]["name"] == "b"


@pytest.mark.parametrize("weight", [1.0, None])
def test_a_source_is_known_by_its_rows_whatever_it_is_called(weight):
    """Also a second time, and where two sources have swapped their names or have equal rows."""
    mine = [source("a", 4, weight), source("b", 9, weight), source("b", 9, weight)]
    mine[2] = replace(mine[2], name="c")
    cursor = PromptCursor(mine, seed=7)
    cursor.next(5)
    for names in ("abc", "xbz", "baq", "abc", "cab"):
        renamed = [replace(each, name=name) for each, name in zip(mine, names, strict=True)]
        other = PromptCursor(renamed, seed=7)
        state = json.loads(json.dumps(cursor.state_dict()))
        assert not other.why_other(state)
        other.load_state_dict(state)
        cursor_ids = ids(cursor.next(20))
        assert ids(other.next(20)) == cursor_ids
        cursor = other
