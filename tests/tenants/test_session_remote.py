"""A session before the engines of rollout ranks, without ranks: which weights are sent when, what the
messages carry, and what fails."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.collect.backlog import Started
from mrl.collect.single_turn import start_groups
from mrl.engine_pool.remote import messages
from mrl.engine_pool.remote.coordinator import Status
from mrl.engine_pool.remote.messages import Delivered, Work
from mrl.engine_pool.remote.wire import MAX_MESSAGE
from mrl.engines.base import EngineLost
from mrl.engines.sampling import SamplingParams
from mrl.errors import InputError, RunFailed
from mrl.service.sessions.engine_samples import MAX_ENDED, Drawing
from mrl.service.sessions.jobs import SessionJobs
from mrl.service.sessions.remote_sampling import RemoteSampling
from mrl.service.sessions.samplers import Source
from mrl.types import Prompt, SampleGroup
from tests.tenants.test_session_sampling import LETHAL, REFUSED, Engine

HOW = {
    "1-1": Drawing(SamplingParams(4, stop=("x",), stop_token_ids=(3,)), 5, None),
    "1-2": Drawing(SamplingParams(4), 6, 0),
}


def groups_of(*tokens: int, name: str = "1-1") -> list[SampleGroup]:
    prompts = [
        Prompt(str(n), torch.tensor([each, 1]), "", {}, source=name)
        for n, each in enumerate(tokens)
    ]
    return start_groups(prompts, 1)


class World:
    """The coordinator and the workers of two engines, who do their work when `deliver` is called."""

    def __init__(self) -> None:
        self.number, self.lacking, self.is_ready = -1, True, True
        self.works: dict[int, Work] = {}
        self.results: dict[int, dict[int, Delivered]] = {}
        self.sent: list[int] = []
        self.coordinator, self.num_closed = self, 0

    def poll(self, work_ids: list[int], number: int) -> Status:
        can_send = self.is_ready and (self.lacking or number > self.number)
        can_proceed = can_send or (number <= self.number and not self.lacking)
        return Status(can_send, can_proceed, set(work_ids) <= self.results.keys())

    def ask_coordinator(self, ask: Any) -> Any:
        return ask(self)

    def sync(self, policy: Any, number: int) -> bool:
        self.number, self.lacking = number, False
        self.sent.append(number)
        return True

    def new_id(self) -> int:
        return len(self.works) + 1

    def assign(self, work: Work) -> None:
        self.works[work.work_id] = Work.of_frame(*work.frame())

    def assign_parts(self, make: Any) -> list[int]:
        works = [make(self.new_id() + part, part, part, 2) for part in range(2)]
        for work in filter(None, works):
            self.assign(work)
        return [work.work_id for work in works if work is not None]

    def take(self, work_id: int) -> dict[int, Delivered]:
        return self.results.pop(work_id)

    def deliver(self, engine: Any) -> None:
        for number, work in self.works.items():
            (job,) = SessionJobs(keeps_routes=False).of(work)
            while not job.is_over:
                try:
                    job.run(engine)
                except EngineLost:
                    continue
            self.results[number] = {0: Delivered.of_frame(*job.finish().frame(number, 0))}

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def world() -> World:
    return World()


def sampling_on(world: World, in_place: Any = None) -> RemoteSampling:
    def present(source: Source) -> AbstractContextManager[None]:
        return nullcontext()

    policy: Any = SimpleNamespace(mount=lambda **keys: None)
    link: Any = world
    return RemoteSampling(link, policy, in_place or present)


def turn(
    sampling: RemoteSampling, world: World, source: Source, groups: Any, how: Any = HOW
) -> Any:
    """Sample a turn; return what was found."""
    sampling.begin(groups, how, source)
    assert not sampling.has_samples
    assert sampling.next_action(has_sent=False) == "send"
    sampling.send()
    if world.works:
        assert sampling.next_action(has_sent=True) == "wait"
    world.deliver(Engine())
    assert sampling.next_action(has_sent=True) == "take"
    sampling.take()
    found = sampling.finish()
    assert sampling.has_samples
    world.works.clear()
    return found


def test_weights_are_sent_when_others_than_before_sample(world: World) -> None:
    sampling = sampling_on(world)
    sources = [
        Source(None, 0, 0), Source(None, 0, 0), Source("one", 1 << 30, 0), Source(None, 1, 1),
        Source("one", 1 << 30, 0), Source("one", 1 << 30, 0),
    ]  # fmt: skip
    for source in sources:
        found = turn(sampling, world, source, groups_of(5, 6, 7))
        assert sorted(g.samples[0].response_ids.tolist() for g in found.groups) == [[5], [6], [7]]
    assert world.sent == [0, 1, 2, 3]


def test_a_worker_in_the_place_of_a_lost_one_gets_the_same_weights(world: World) -> None:
    sampling = sampling_on(world)
    sampling.begin(groups_of(5, 6), HOW, Source(None, 7, 7))
    world.is_ready = False
    assert sampling.next_action(has_sent=False) == "wait"
    world.is_ready = True
    sampling.send()
    works = dict(world.works)
    assert sampling.next_action(has_sent=True) == "wait"
    world.lacking = True
    assert sampling.next_action(has_sent=True) == "send"
    sampling.send()
    assert (world.sent, world.works) == ([0, 0], works)


def test_each_engine_draws_its_groups_as_the_operations_say(world: World) -> None:
    sampling = sampling_on(world)
    two = [*groups_of(5, 6, 8), *groups_of(7, name="1-2")]
    groups = [
        SampleGroup(g.prompt, start_groups([g.prompt], 1, n)[0].samples) for n, g in enumerate(two)
    ]
    sampling.begin(groups, HOW, Source(None, 0, 0))
    sampling.send()
    one, other = world.works.values()
    assert [each.seed for each in one.started] == [5, 5]
    assert [each.seed for each in other.started] == [5, 6]
    assert {n: Drawing.of_json(how) for n, how in other.details["how"].items()} == HOW
    world.deliver(Engine())
    sampling.take()
    found = sampling.finish()
    assert {number: each.logprobs for number, each in found.scores.items()} == {3: [None, -1.0]}
    assert not found.failures


def test_a_work_item_may_have_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session may have 131,072 prompts in its queue, and their seeds have up to 16 digits."""
    groups = groups_of(5) * 70_000
    monkeypatch.setattr(messages, "encode_groups", lambda given: b"groups")  # it is slow
    monkeypatch.setattr(messages, "decode_groups", lambda body: groups)
    started = tuple(Started(each, (1 << 53) - 1 - k) for k, each in enumerate(groups))
    work = Work(1, 0, "samples", 3, len(started), started, {"how": {}})
    message, body = work.frame()
    assert len(json.dumps(message)) < MAX_MESSAGE
    again = Work.of_frame(message, body)
    assert [one.seed for one in again.started] == [one.seed for one in started]
    assert (again.details, again.num_wanted) == ({"how": {}}, len(started))


def test_errors_and_the_death_of_engines_come_back(world: World) -> None:
    sampling = sampling_on(world)
    found = turn(sampling, world, Source(None, 0, 0), groups_of(5, REFUSED))
    assert list(found.failures) == ["1-1"]
    assert "the engine refused" in found.failures["1-1"]
    for number in range(MAX_ENDED):
        how = {"1-2": Drawing(SamplingParams(4), number, None)}
        lethal = groups_of(LETHAL, name="1-2")
        found = turn(sampling, world, Source(None, 0, 0), lethal, how)
        assert (found.num_ended, "third time" in found.failures["1-2"]) == (1, True)
    sampling.begin(groups_of(5), HOW, Source(None, 0, 0))
    sampling.send()
    assert [work.details["num_ended"] for work in world.works.values()] == [MAX_ENDED]


def test_a_sampler_that_cannot_be_read_fails_its_samples(world: World) -> None:
    def in_place(source: Source) -> AbstractContextManager[None]:
        if source.name is not None:
            raise InputError("checkpoint iter_0000003 is damaged")
        return nullcontext()

    sampling = sampling_on(world, in_place)
    found = turn(sampling, world, Source("x", 1 << 30, 3), groups_of(5))
    assert found.failures == dict.fromkeys(HOW, "checkpoint iter_0000003 is damaged")
    assert not world.sent
    found = turn(sampling, world, Source(None, 3, 3), groups_of(5))
    assert (len(found.groups), world.sent) == (1, [1])


def test_what_a_worker_reports_ends_the_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def poll(self: World, work_ids: list[int], number: int) -> Status:
        raise RunFailed("rollout engine 0: it has no room")

    sampling = sampling_on(world)
    sampling.begin(groups_of(5), HOW, Source(None, 0, 0))
    monkeypatch.setattr(World, "poll", poll)
    with pytest.raises(RunFailed, match="no room"):
        sampling.next_action(has_sent=False)
    sampling.close()
    assert world.num_closed == 1
