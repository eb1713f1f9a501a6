import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.data import PromptCursor
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
