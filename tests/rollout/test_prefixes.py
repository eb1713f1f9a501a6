"""What `KnownPrefixes` remembers of the requests of a version, and which reads of the cache it
refuses."""

import random

import pytest
import torch

from mrl.engines.sglang.prefixes import KnownPrefixes, _Sequences
from mrl.errors import WrongWeights


def ids(*tokens):
    return torch.tensor(tokens)


def test_nothing_remains_of_a_request_that_did_not_run_under_a_version():
    known = KnownPrefixes()
    for number in range(3):
        known.add(8, f"{number}", ids(1, 2))
        known.finish(8, f"{number}", ids(1, 2, 3), 0)
        known.discard(8, f"{number}")
    assert not any(vars(known._versions[8]).values())


def test_a_prefix_that_nobody_computed():
    known = KnownPrefixes()
    known.add(8, "a", ids(1, 2, 3))
    with pytest.raises(WrongWeights, match=r"A: 2 tokens came from the prefix cache, .* version 8"):
        known.finish(8, "a", ids(1, 2, 3, 9), 2, "A")


def test_a_read_is_looked_up_again_when_those_who_may_have_computed_it_are_answered():
    known = KnownPrefixes()
    for rid, last in (("a", 3), ("b", 4)):
        known.add(8, rid, ids(1, 2, last))
    known.finish(8, "a", ids(1, 2, 3, 9), 2, "A")  # b may have computed two tokens
    with pytest.raises(WrongWeights, match="A: 2 tokens"):  # neither of the two has
        known.finish(8, "b", ids(1, 2, 4), 2, "B")


def test_a_read_of_what_a_discarded_request_would_have_computed():
    known = KnownPrefixes()
    for rid in ("a", "b"):
        known.add(8, rid, ids(1, 2, 3))
    known.finish(8, "a", ids(1, 2, 3, 9), 2, "A")
    with pytest.raises(WrongWeights, match="A: 2 tokens"):
        known.discard(8, "b")


def test_tokens_of_a_completion_can_be_read_before_its_answer_is_known():
    """Two episodes sample the same first turn, one under version 7 and one under 8. The second turn of
    the former, under 8, reads what the latter has computed, and is answered first."""
    known = KnownPrefixes()
    known.add(8, "late", ids(1, 2))
    known.finish(8, "turn 2", ids(1, 2, 3, 4, 5, 6), 4, "turn 2")
    known.finish(8, "late", ids(1, 2, 3, 4), 0, "late")
    known.finish(8, "next", ids(1, 2, 3, 4, 5, 6, 7), 6, "next")
    assert not known._versions[8].unproved


def test_the_completion_was_another_one():
    known = KnownPrefixes()
    known.add(8, "late", ids(1, 2))
    known.finish(8, "turn 2", ids(1, 2, 3, 4, 5, 6), 4, "turn 2")
    with pytest.raises(WrongWeights, match="turn 2: 4 tokens"):
        known.finish(8, "late", ids(1, 2, 9, 4), 0, "late")


def test_a_prefix_that_many_requests_read_is_looked_up_in_constant_time(monkeypatch):
    """The request that has computed it is the last of those that begin with it."""
    known, num_seen, look = KnownPrefixes(), 0, _Sequences._starting_with

    def count(self, prefix):
        nonlocal num_seen
        for rid in look(self, prefix):
            num_seen += 1
            yield rid

    monkeypatch.setattr(_Sequences, "_starting_with", count)
    known.finish(8, "author", ids(1, 2, 1000), 0)
    for number in range(100):
        known.finish(8, f"{number}", ids(1, 2, number), 2)
    assert num_seen <= 100
    known.discard(8, "author")
    with pytest.raises(WrongWeights, match="late: 2 tokens"):
        known.finish(8, "late", ids(1, 2, 5), 2, "late")


def test_prefixes_are_known_by_version_until_the_version_is_forgotten():
    known = KnownPrefixes()
    known.finish(8, "c", ids(1, 300, 2, 70_000), 0)
    known.finish(8, "d", ids(1, 300, 2, 70_000, 5), 4, "D")
    with pytest.raises(WrongWeights, match=r"E: 4 tokens.* version 7"):
        known.finish(7, "e", ids(1, 300, 2, 70_000, 5), 4, "E")
    known.keep([7])
    with pytest.raises(WrongWeights, match=r"F: 4 tokens.* version 8"):
        known.finish(8, "f", ids(1, 300, 2, 70_000, 5), 4, "F")


@pytest.mark.parametrize("is_planted", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_answers_that_come_late_and_in_another_order(seed, is_planted):
    """A cache that is right is never refused, and one stale read is, whatever the order of answers."""
    chance, known = random.Random(seed), KnownPrefixes()
    cache: set[tuple[int, ...]] = set()
    late: list[tuple[str, tuple[int, ...], int]] = []  # computed, but the answer is not read yet

    def answer():
        rid, tokens, num_cached = late.pop(chance.randrange(len(late)))
        if num_cached < 0:
            known.discard(8, rid)
        else:
            known.finish(8, rid, ids(*tokens), num_cached, rid)

    def play():
        histories: list[tuple[int, ...]] = [(1, 2, 3)] * 8
        for number in range(200):
            place = chance.randrange(len(histories))
            prompt, rid = histories[place], f"{number}"
            known.add(8, rid, ids(*prompt))
            tokens = (*prompt, *chance.choices([4, 5], k=chance.randint(1, 3)))
            if chance.random() < 0.2:  # it ran under older weights, and its key is theirs
                late.append((rid, tokens, -1))
            else:
                num_cached = max(n for n in range(len(prompt)) if n == 0 or prompt[:n] in cache)
                cache.update(tokens[:n] for n in range(1, len(tokens)))
                late.append((rid, tokens, num_cached))
            histories[place] = (1, 2, 3) if len(tokens) > 12 else (*tokens, 6)
            while late and chance.random() < 0.5:
                answer()
        if is_planted:
            late.append(("stale", (1, 2, 3, 7, 7, 7), 4))
        while late:
            answer()

    if is_planted:
        with pytest.raises(WrongWeights, match="stale: 4 tokens"):
            play()
    else:
        play()
        assert not known._versions[8].unproved
