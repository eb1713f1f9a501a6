"""Single cases of the ledger, each as small as can be; random jobs are in test_ledger.py."""

from typing import Any

import pytest

from mrl.scheduling.ledger import Ledger
from mrl.scheduling.records import Partial


def make(size=1, bound=1, at_bound: Any = "wait", session="a"):
    ledger = Ledger(
        session=session,
        prompts_per_step=size,
        max_staleness=bound,
        at_bound=at_bound,
    )
    ledger.join(0)
    ledger.join(1)
    ledger.add(f"p{i}" for i in range(20))
    return ledger


def finish(ledger, lease, oldest=None, newest=None):
    oldest = lease.oldest if oldest is None else oldest
    newest = oldest if newest is None else newest
    return ledger.finish(lease.lease_id, lease.prompt, oldest=oldest, newest=newest, num_tokens=5)


def taken(batch):
    return batch and [group.item_id for group in batch]


def test_the_trainer_waits_for_a_group_that_would_be_late_next():
    ledger = make()
    slow, fast = ledger.lease(0, 0, 8)
    finish(ledger, fast)
    assert taken(ledger.take(0)) == [1], "step 1 can still train on prompt 0"
    (other,) = ledger.lease(0, 1, 8)
    finish(ledger, other)
    assert ledger.take(1) is None, "prompt 0 is due in step 1"
    finish(ledger, slow)
    assert taken(ledger.take(1)) == [0]
    assert taken(ledger.take(2)) == [2]
    assert ledger.tally.discarded_tokens == 0


def test_what_is_due_first_is_trained_first_whatever_its_number():
    ledger = make(bound=2)
    first, lost = ledger.lease(0, 0, 2)
    (late,) = ledger.lease(1, 0, 1)
    finish(ledger, first)
    assert taken(ledger.take(0)) == [0]
    finish(ledger, ledger.lease(1, 1, 1)[0])
    ledger.lose(0)
    assert taken(ledger.take(1)) == [3]
    (again,) = ledger.lease(1, 2, 1)
    assert again.item_id == lost.item_id == 1
    finish(ledger, again)
    finish(ledger, late)
    assert taken(ledger.take(2)) == [2], "prompt 1 is due in step 4, prompt 2 in step 2"
    assert taken(ledger.take(3)) == [1]


def test_drop_does_not_wait_and_counts():
    ledger = make(at_bound="drop")
    slow, fast = ledger.lease(0, 0, 8)
    finish(ledger, fast)
    ledger.take(0)
    finish(ledger, ledger.lease(0, 1, 8)[0])
    assert taken(ledger.take(1)) == [2]
    assert ledger.capacity(2) == 1, "the late group still runs"
    assert not finish(ledger, slow)
    assert ledger.capacity(2) == 2, "another prompt takes its place"
    assert ledger.tally.dropped == {"too_old": 1}
    assert ledger.tally.discarded_tokens == 5


def test_an_old_engine_has_to_wait_for_newer_weights():
    ledger = make()
    for lease in ledger.lease(0, 0, 8):
        finish(ledger, lease)
    assert ledger.lease(0, 0, 8) == [], "two steps have their groups"
    ledger.take(0)
    assert ledger.lease(0, 0, 8) == [], "step 1 has its group, and step 2 needs version 1"
    assert [lease.item_id for lease in ledger.lease(1, 1, 8)] == [2]
    on_policy = make(bound=0)
    assert len(on_policy.lease(0, 0, 8)) == 1
    assert on_policy.lease(1, 0, 8) == []


def test_prompts_of_a_lost_worker_are_leased_first_and_its_groups_are_duplicates():
    ledger = make(size=4, bound=0)
    lost = ledger.lease(0, 0, 2)
    kept = ledger.lease(1, 0, 1)
    assert ledger.lose(0) == lost
    with pytest.raises(ValueError, match="worker 0 has not joined"):
        ledger.lease(0, 0, 1)
    again = ledger.lease(1, 0, 8)
    assert [lease.item_id for lease in again] == [0, 1, 3]
    assert not finish(ledger, lost[0])
    for lease in [*kept, *again]:
        assert finish(ledger, lease)
        assert not finish(ledger, lease)
    assert ledger.tally.duplicates == 5
    assert taken(ledger.take(0)) == [0, 1, 2, 3]


def test_partial_rollouts_are_continued_within_the_bound_and_discarded_beyond_it():
    ledger = make(size=1, bound=1)
    first, second = ledger.lease(0, 0, 8)
    for lease in (first, second):
        assert ledger.report(lease.lease_id, Partial("tokens", 0, 2))
    ledger.lose(0)
    (again,) = ledger.lease(1, 0, 1)
    assert again.partial == Partial("tokens", 0, 2)
    assert again.oldest == 0
    finish(ledger, again, oldest=0, newest=0)
    ledger.take(0)
    (third,) = ledger.lease(1, 1, 1)
    assert third.item_id == 1
    assert third.partial, "step 1 is the last that may train on it"
    assert third.oldest == 0
    ledger.lose(1)
    finish_me = make(size=1, bound=1, session="b")
    finish_me.load(ledger.counts(), 2, ledger.prompts, [], ledger.partials)
    finish_me.join(0)
    (anew,) = finish_me.lease(0, 2, 1)
    assert anew.partial is None, "version 0 is too old for step 2"
    assert finish_me.tally.discarded_tokens == 2
    assert not ledger.report(first.lease_id, Partial("late", 0, 2))


@pytest.mark.parametrize(("oldest", "newest"), [(0, 1), (1, 3), (2, 1)])
def test_impossible_stamps_are_refused(oldest, newest):
    ledger = make(bound=4)
    for step in (0, 1):
        finish(ledger, ledger.lease(0, step, 1)[0])
        ledger.take(step)
    lease = ledger.lease(0, 1, 1)[0]
    with pytest.raises(ValueError, match="the stamps of its engine are wrong"):
        finish(ledger, lease, oldest=oldest, newest=newest)
    assert finish(ledger, lease, oldest=1, newest=2), "nothing was changed"


def test_other_calls_that_cannot_be_are_refused():
    ledger = make()
    with pytest.raises(ValueError, match="got step 1, expected 0"):
        ledger.take(1)
    with pytest.raises(ValueError, match="asks with weights 1, expected 0 to 0"):
        ledger.lease(0, 1, 1)
    with pytest.raises(ValueError, match="expected at least 1 and 0"):
        make(size=0)


def test_a_group_that_a_resume_does_not_keep_is_generated_again():
    ledger = make(size=2, bound=0)
    for lease in ledger.lease(0, 0, 2):
        finish(ledger, lease)
    other = make(size=2, bound=0, session="b")
    other.load(ledger.counts(), 0, ledger.prompts, list(ledger.finished.values())[:1], {})
    assert other.waiting[0] == 1
    assert [group.group for group in other.finished.values()] == ["p0"]


def test_metrics():
    ledger = make(size=1, bound=2)
    leases = ledger.lease(0, 0, 3)
    finish(ledger, leases[0])
    ledger.take(0)
    finish(ledger, leases[1])
    ledger.take(1)
    finish(ledger, leases[2])
    finish(ledger, leases[2])
    ledger.drop(ledger.lease(0, 2, 1)[0].lease_id, "zero_variance", 4)
    ledger.lease(0, 2, 1)
    assert ledger.metrics() == {
        "async/waiting_prompts": 15.0,
        "async/leased_groups": 1.0,
        "async/queued_groups": 1.0,
        "async/queue_age": 2.0,
        "async/duplicates": 1.0,
        "async/discarded_tokens": 9.0,
        "async/kept_tokens": 0.0,
        "async/dropped/zero_variance": 1.0,
        "async/staleness/0": 0.0,
        "async/staleness/1": 1.0,
        "async/staleness/2": 0.0,
    }
