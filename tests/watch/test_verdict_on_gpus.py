"""Who hangs where the ranks' collectives are only queued on GPUs: it is not told who waits for whom."""

from __future__ import annotations

from mrl.system.heartbeat import Collective
from mrl.watch.verdict import Observation
from tests.watch.test_verdict import run, seen, watch

GPU_RUN = [("all_reduce", "tp", 90), ("all_to_all", "ep", 91), ("all_gather", "dp", 90)]
"""What three ranks show that hang in one phase: their last collectives."""


def hanging(collectives: list[Collective]) -> list[Observation]:
    return [seen("train", 9, 5 + n)._replace(collective=c) for n, c in enumerate(collectives)]


def test_ranks_whose_collectives_are_queued_on_gpus_are_not_told_apart() -> None:
    """Each of them asked its GPU for a collective and went on: any may have stopped after that."""
    queued = [Collective(*each, is_over=False, is_queued=True) for each in GPU_RUN]
    done = [each._replace(is_over=True, is_queued=False) for each in queued]
    for mixed in (queued, [done[0], *queued[1:]], [*done[:2], queued[2]]):
        found = run(watch({"train": 4.0}), 60, *hanging(mixed))
        assert found is not None
        assert (found.how, found.suspects) == ("stuck", (0, 1, 2))
        assert found.text() == (
            "rank unknown: one of 0, 1, 2, whose collectives are queued on GPUs, makes no progress: "
            "4.5 s in phase train of step 3, whose limit is 4 s"
        )
    told = run(watch({"train": 4.0}), 60, *hanging(done))
    assert told is not None
    assert (told.rank, told.suspects) == (0, ())  # on CPUs each end is known


def test_a_rank_that_is_behind_or_stopped_is_known_whatever_is_queued() -> None:
    queued = [Collective(*each, is_over=False, is_queued=True) for each in GPU_RUN]
    ranks = hanging(queued)
    behind = ranks[1]._replace(pulse=ranks[1].pulse._replace(position=8))
    stopped = ranks[2]._replace(state="T")
    for known, number, how in (
        ([ranks[0], behind, ranks[2]], 1, "stuck"),
        ([*ranks[:2], stopped], 2, "stopped"),
    ):
        found = run(watch({"train": 4.0}), 60, *known)
        assert found is not None
        assert (found.rank, found.how, found.suspects) == (number, how, ())


def test_ranks_that_wait_in_a_call_are_not_suspected() -> None:
    """Rank 3 has asked its GPU for a collective and goes on; the others wait for it in a barrier."""
    waits = Collective("barrier", "world", 91, is_over=False)
    queued = Collective("all_reduce", "dp", 90, is_over=False, is_queued=True)
    found = run(watch({"train": 4.0}), 60, *hanging([waits, waits, waits, queued]))
    assert found is not None
    assert (found.rank, found.suspects) == (3, ())
    found = run(watch({"train": 4.0}), 60, *hanging([waits, queued, waits, queued]))
    assert found is not None
    assert found.suspects == (1, 3)
