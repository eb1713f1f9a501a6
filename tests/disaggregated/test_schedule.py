"""A fixed schedule gives every batch to the version that it names, whatever happens to the workers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.disaggregated.schedule import ScheduledLedger
from mrl.errors import EngineGone, InputError

SHAPES = st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 3))
"""Prompts per step, bound, engines."""


def make(shape, session="0"):
    size, bound, engines = shape
    ledger = ScheduledLedger(
        session=session, prompts_per_step=size, max_staleness=bound, num_engines=engines
    )
    for engine in range(engines):
        assert ledger.join(engine, 1, 0.0)
    return ledger


def lease(ledger, engine, version):
    ledger.add([f"prompt {ledger._next_item + i}" for i in range(ledger.num_to_draw(version))])
    return ledger.lease(engine, version)


def finish(ledger, one, **versions):
    stamps = {"oldest": one.version, "newest": one.version, "num_tokens": 3, **versions}
    return ledger.finish(one.lease_id, f"{one.prompt} by {one.version}", **stamps)


def take(ledger):
    batch = ledger.take(ledger.step)
    return batch and [group.group for group in batch]


def expected(shape, step):
    size, bound, _ = shape
    version = max(0, step - bound)
    return [f"prompt {i} by {version}" for i in range(step * size, (step + 1) * size)]


class Job:
    """Engines that get each version when all before is finished, in any order of events."""

    def __init__(self, shape):
        self.shape, self.ledger, self.num_loads = shape, make(shape), 0
        self.engines = [0] * shape[2]
        self.version = 0
        self.shares = {}
        self.batches = []

    def push(self, engine):
        """Give an engine the next version, which the trainer has, once its own shares are finished."""
        version = self.engines[engine] + 1
        if version > self.version:
            return
        size, bound, engines = self.shape
        own = [b * size + i for b in range(version + bound) for i in range(engine, size, engines)]
        if self._are_done(own):
            self.engines[engine] = version

    def _are_done(self, ids):
        ledger = self.ledger
        done = {group.item_id for group in ledger.finished} | set(
            range(ledger.step * self.shape[0])
        )
        return done.issuperset(ids)

    def begin(self, engine):
        granted = lease(self.ledger, engine, self.engines[engine])
        if granted:
            size, bound, engines = self.shape
            batch = granted[0].item_id // size
            share = range(batch * size + engine, (batch + 1) * size, engines)
            assert [one.item_id for one in granted] == list(share), "a whole share, and its own"
            assert self.engines[engine] == max(0, batch - bound)
            assert not self.shares.get(engine), "one share at a time"
            self.shares[engine] = granted

    def finish(self, engine):
        if self.shares.get(engine):
            assert finish(self.ledger, self.shares[engine].pop())

    def die(self, engine):
        """Lose a worker in the middle of a share; another one gets the same weights."""
        lost = self.ledger.lose(engine)
        assert lost == self.shares.pop(engine, [])
        self.ledger.join(engine, 1, 0.0)

    def step(self):
        batch = take(self.ledger)
        if batch is not None:
            assert batch == expected(self.shape, len(self.batches))
            self.batches.append(batch)
            self.version += 1

    def save_and_load(self):
        if self.ledger.num_owed(self.version):
            return
        state = json.dumps(self.ledger.state_dict())
        groups = {group.item_id: group.group for group in self.ledger.finished}
        prompts = self.ledger.prompts
        self.num_loads += 1
        self.ledger = make(self.shape, str(self.num_loads))
        self.ledger.load_state_dict(json.loads(state), prompts, groups)
        for engine in range(self.shape[2]):
            self.ledger.join(engine, 1, 0.0)
        self.engines = [self.version] * self.shape[2]
        self.shares = {}

    def do_steps(self, count):
        wanted = len(self.batches) + count
        for _ in range(400):
            if len(self.batches) == wanted:
                return
            self.step()
            for engine in range(self.shape[2]):
                self.push(engine)
                if not self.shares.get(engine):
                    self.begin(engine)
                self.finish(engine)
        raise AssertionError("a deadlock")


@settings(max_examples=80)
@given(
    shape=SHAPES,
    events=st.lists(
        st.tuples(
            st.sampled_from(
                ["push", "begin", "begin", "finish", "finish", "finish", "die", "step", "load"]
            ),
            st.integers(0, 2),
        ),
        max_size=80,
    ),
)
def test_every_batch_is_of_the_version_that_the_schedule_names(shape, events):
    job = Job(shape)
    for event, number in events:
        if event == "step":
            job.step()
        elif event == "load":
            job.save_and_load()
        else:
            getattr(job, event)(number % shape[2])
    job.do_steps(4)
    ledger = job.ledger
    assert ledger.tally.trained == len(job.batches) * shape[0]
    assert not ledger.tally.dropped


def test_weights_that_nobody_has_any_more_end_the_run():
    ledger = make((2, 1, 1))
    for _ in range(2):
        for one in lease(ledger, 0, 0):
            finish(ledger, one)
    assert take(ledger) == expected((2, 1, 1), 0)
    assert lease(ledger, 0, 0) == []  # batch 2 is version 1's
    begun = lease(ledger, 0, 1)
    finish(ledger, begun[0])
    assert take(ledger) == expected((2, 1, 1), 1)
    assert ledger.num_owed(2) == 1
    ledger.lose(0)
    assert ledger.num_owed(2) == 2, "the finished half of the share is generated anew"
    assert ledger.tally.discarded_tokens == 3
    ledger.join(0, 2, 0.0)
    with pytest.raises(
        EngineGone, match="weights 1 have to generate batch 2, and engine 0 has weights 2"
    ):
        ledger.lease(0, 2)


def test_a_share_that_is_half_finished_comes_back_whole_from_a_checkpoint():
    ledger = make((2, 0, 1))
    finish(ledger, lease(ledger, 0, 0)[0])
    other = make((2, 0, 1), "1")
    groups = {group.item_id: group.group for group in ledger.finished}
    other.load_state_dict(ledger.state_dict(), ledger.prompts, groups)
    other.join(0, 1, 0.0)
    assert [one.item_id for one in other.lease(0, 0)] == [0, 1]


def test_a_wrong_stamp_another_schedule_and_a_drop_are_refused():
    ledger = make((2, 2, 1))
    for one in lease(ledger, 0, 0):
        finish(ledger, one)
    take(ledger)
    begun = lease(ledger, 0, 0)
    with pytest.raises(ValueError, match="stamps of its engine are wrong"):
        finish(ledger, begun[0], newest=1)
    with pytest.raises(ValueError, match="cannot drop"):
        ledger.drop(begun[0].lease_id, "zero_variance")
    with pytest.raises(InputError, match="resume with the recipe of the checkpoint"):
        make((2, 1, 1), "1").load_state_dict(ledger.state_dict(), ledger.prompts, {})


def test_engines_without_a_prompt_wait():
    ledger = make((1, 0, 2))
    assert lease(ledger, 1, 0) == []
    assert [one.item_id for one in lease(ledger, 0, 0)] == [0]
