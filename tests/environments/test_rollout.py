"""Episodes of a rollout advance on their own: real worker processes, and an engine without a model."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrl.collect.multi_turn import GroupEnvironments, MultiTurnRollout
from mrl.collect.single_turn import start_groups
from mrl.config import EnvironmentConfig
from mrl.engines.base import EngineLost, Request
from mrl.engines.sampling import SamplingParams
from mrl.environments.runner import EnvironmentRunner
from mrl.errors import RunFailed
from tests.endpoint.speaking import Speaking, make_prompt, tokenizer
from tests.release import release
from tests.waiting import wait_until

ZOO = Path(__file__).with_name("waiting_zoo.py")
ONE_TURN = SamplingParams(40)


class Engine(Speaking):
    """Says what follows from the tokens and the seed of a request, as an engine does. It refuses ids
    that are in flight already, and may be slow, or lost after a number of answers."""

    def __init__(self, *, delay_s: float = 0.0, lost_after: int | None = None) -> None:
        super().__init__(tokenizer(), self.words)
        self.delay_s, self.lost_after = delay_s, lost_after
        self.is_last: Callable[[Request], bool] = lambda request: False
        """The requests that are answered after the others of their call."""
        self.open: set[str] = set()
        self.num_calls = self.num_answers = 0
        self.lock = threading.Lock()

    def words(self, request):
        given = request.token_ids.numpy().tobytes() + str(request.seed).encode()
        return hashlib.sha256(given).hexdigest()[:5]

    def generate(self, requests, **options):
        ids = {request.request_id for request in requests}
        with self.lock:
            assert not ids & self.open
            self.open |= ids
            self.num_calls += 1
        try:
            order = list(requests)
            random.shuffle(order)
            order.sort(key=self.is_last)
            for completion in super().generate(order, **options):
                time.sleep(random.random() * self.delay_s)
                with self.lock:
                    if self.lost_after is not None and self.num_answers >= self.lost_after:
                        raise EngineLost("on purpose")
                    self.num_answers += 1
                yield completion
        finally:
            with self.lock:
                self.open -= ids


@contextlib.contextmanager
def environments(
    name="Waits", *, num_workers=2, time_limit_s=60.0, **arguments
) -> Iterator[EnvironmentRunner]:
    config = EnvironmentConfig(
        name=f"{ZOO}:{name}",
        arguments=arguments,
        num_workers=num_workers,
        time_limit_s=time_limit_s,
    )
    with EnvironmentRunner(config) as runner:
        yield runner


def rollout_of(
    runner, rows, *, samples=2, step_samples=1000, max_turns=9, context_len=500, sampling=ONE_TURN
) -> MultiTurnRollout:
    words = tokenizer()
    prompts = [make_prompt(words, "p", **row) for row in rows]
    return MultiTurnRollout(
        start_groups(prompts, samples), GroupEnvironments(runner), words, sampling=sampling,
        max_turns=max_turns, context_len=context_len, seeds=list(range(len(rows))),
        step_samples=step_samples,
    )  # fmt: skip


def bits(groups):
    return [
        (
            group.rewards.tolist(),
            [
                (s.token_ids.tolist(), s.rollout_logprobs.tolist(), s.turn_rewards)
                for s in group.samples
            ],
        )
        for group in sorted(groups, key=lambda group: group.samples[0].group_id)
    ]


def test_a_last_turn_that_is_cut_can_still_stop():
    """An engine refuses stops for completions of one exact length, which ends the run."""
    engine = Engine()
    sampling = SamplingParams(20, 10, stop=("never",))
    with environments() as runner:
        list(rollout_of(runner, [{}], context_len=10, sampling=sampling).finished(engine))
    assert engine.asked
    for request in engine.asked:
        assert request.sampling.max_new_tokens <= 9
        assert request.sampling.min_new_tokens < request.sampling.max_new_tokens


@pytest.mark.parametrize("at", ["step", "reset"])
def test_an_environment_that_waits_holds_nobody(at, tmp_path):
    """All other groups are complete before it has answered once."""
    file = tmp_path / "go"
    with environments(num_workers=1) as runner:
        rollout = rollout_of(runner, [{"file": str(file), "at": at}, *[{}] * 5])
        groups = rollout.finished(Engine())
        others = [next(groups) for _ in range(5)]
        assert {group.samples[0].group_id for group in others} == {1, 2, 3, 4, 5}
        assert not rollout.is_over
        file.touch()
        (last,) = groups
        assert rollout.is_over
    for group in [*others, last]:
        assert group.rewards.tolist() == [6.0, 6.0]
        assert [reward for _, reward in group.samples[0].turn_rewards] == [1.0, 2.0, 3.0]


def test_rewards_whose_sum_is_too_large_for_float32_mask_the_episode():
    with environments("Rich") as runner:
        rollout = rollout_of(runner, [{}, {"reward": 1e38}])
        groups = sorted(rollout.finished(Engine()), key=lambda group: group.samples[0].group_id)
        assert runner.num_failed == 2
        assert "the sum of its rewards is 6e+38" in runner.first_error
    assert groups[0].rewards.isnan().all()
    assert groups[1].rewards.tolist() == pytest.approx([2e38, 2e38])


def test_a_completion_that_takes_long_holds_nobody():
    engine, all_others = Engine(), threading.Event()
    engine.is_last = lambda request: "group 0 sample 1 turn 1" in request.request_id

    def say(request):
        if engine.is_last(request):
            assert all_others.wait(60)
        return engine.words(request)

    engine.say = say
    with environments() as runner:
        groups = rollout_of(runner, [{}] * 4).finished(engine)
        assert {next(groups).samples[0].group_id for _ in range(3)} == {1, 2, 3}
        all_others.set()
        assert len(list(groups)) == 1


def test_results_do_not_depend_on_time():
    """Random times of the engine and of the environments, in other processes: the same samples."""
    found = []
    for num_workers, delay_s in ((1, 0.0), (3, 0.01), (2, 0.003)):
        with environments("Delays", num_workers=num_workers) as runner:
            rollout = rollout_of(runner, [{}] * 6, samples=4)
            found.append(bits(rollout.finished(Engine(delay_s=delay_s))))
    assert found[0] == found[1] == found[2]
    tokens = {tuple(sample[0]) for _, samples in found[0] for sample in samples}
    assert len(tokens) == 24


@pytest.mark.parametrize("lost_after", [1, 12, *map(release, (0, 7, 17))])
def test_an_engine_that_is_lost_costs_no_bit(lost_after):
    """The engines are lost with turns and environments pending. No environment is begun again."""
    with environments("Delays") as runner:
        expected = bits(rollout_of(runner, [{}] * 3).finished(Engine()))
        rollout = rollout_of(runner, [{}] * 3)
        groups = []
        first, second = Engine(lost_after=lost_after, delay_s=0.01), Engine(lost_after=1)
        for engine in (first, second, Engine()):
            with contextlib.suppress(EngineLost):
                groups += rollout.finished(engine)
        assert rollout.is_over
        assert bits(groups) == expected
        assert (runner.num_failed, runner.num_replayed) == (0, 0)
        assert first.num_answers == lost_after


def test_an_engine_is_lost_while_only_environments_are_pending(tmp_path):
    """The loss shows when the next turn is asked for, and what the environments said is kept."""
    file = tmp_path / "go"
    with environments() as runner:
        rollout = rollout_of(runner, [{"file": str(file)}])
        lost = Engine(lost_after=2)
        groups = rollout.finished(lost)
        begun = threading.Thread(target=lambda: file.touch() if wait_for_answers(lost, 2) else None)
        begun.start()
        with pytest.raises(EngineLost):
            next(groups)
        begun.join()
        assert lost.num_answers == 2
        (group,) = rollout.finished(Engine())
        assert group.rewards.tolist() == [6.0, 6.0]


def wait_for_answers(engine, num):
    wait_until(lambda: engine.num_answers == num and not engine.open, "the engine's answers")
    return True


def test_groups_complete_while_the_weights_change():
    """The version is None then. It is needed only for a sample without tokens of the policy."""

    class Changing(Engine):
        """Has its version when the rollout begins and while it samples, and none when groups end."""

        looks = 0
        samples = threading.local()

        @property
        def weight_version(self):
            self.looks += 1
            return 3 if self.looks == 1 or getattr(self.samples, "now", False) else None

        def complete(self, request, text):
            self.samples.now = True
            try:
                return super().complete(request, text)
            finally:
                self.samples.now = False

    with environments() as runner:
        groups = list(rollout_of(runner, [{}] * 2).finished(Changing()))
        assert [group.rewards.tolist() for group in groups] == [[6.0, 6.0]] * 2


class Loading(Engine):
    """Gets its first weights after a while; calls wait for them."""

    def __init__(self):
        super().__init__()
        self.loaded = False

    @property
    def weight_version(self):
        return 3 if self.loaded else None

    def generate(self, requests, **options):
        time.sleep(0.1)
        self.loaded = True
        yield from super().generate(requests, **options)


def test_a_sample_without_tokens_has_a_version_though_the_weights_were_loading():
    config = EnvironmentConfig(name=f"{ZOO.with_name('zoo.py')}:Shouts")
    with EnvironmentRunner(config) as runner:
        (group,) = rollout_of(runner, [{}]).finished(Loading())
        assert group.rewards.isnan().all()
        assert group.samples[0].weight_versions[0].version == 3


@pytest.mark.usefixtures("ends_at_once")
def test_too_many_failures_end_the_rollout_and_all_that_it_runs(tmp_path):
    """While a turn and a step of others are pending."""
    engine, ended = Engine(), threading.Event()
    engine.is_last = lambda request: "group 1 sample 0 turn 1" in request.request_id

    def say(request):
        if engine.is_last(request):
            assert ended.wait(60)
        return engine.words(request)

    def abort(request_ids=None):
        ended.set()

    engine.say, engine.abort = say, abort
    with environments("Fails", num_workers=1) as runner:
        rows = [{"at": "fails"}, {}, {"file": str(tmp_path / "never")}]
        rollout = rollout_of(runner, rows, samples=1, step_samples=19)
        with pytest.raises(RunFailed, match=r"failed on 1 of 19 samples .*ValueError: on purpose"):
            list(rollout.finished(engine))
        assert not engine.open
        assert not runner._places  # all of them were ended


@pytest.mark.usefixtures("ends_at_once")
def test_a_rollout_that_is_left_early_ends_what_it_runs(tmp_path):
    engine = Engine()
    with environments() as runner:
        groups = rollout_of(runner, [{}, {"file": str(tmp_path / "never")}]).finished(engine)
        next(groups)
        groups.close()
        assert not engine.open
        assert not runner._places


def test_rollouts_share_a_runner_and_count_their_own_failures():
    """As the groups of leases do."""
    with environments("Fails") as runner:
        rollouts = [rollout_of(runner, [row]) for row in ({"at": "fails"}, {}, {"at": "fails"})]
        groups: list = [None] * 3

        def play(place):
            (groups[place],) = rollouts[place].finished(Engine(delay_s=0.01))

        threads = [threading.Thread(target=play, args=(place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r._environments.num_failed for r in rollouts] == [2, 0, 2]
        assert runner.num_failed == 4
        assert [group.rewards.isnan().all().item() for group in groups] == [True, False, True]
        assert [len(s.weight_versions) for s in groups[0].samples] == [2, 2]


def test_turns_that_are_ready_together_are_sent_together():
    """Far fewer calls than turns, though 64 environments answer one after another and a loaded
    machine spreads their answers."""
    engine = Engine()
    with environments() as runner:
        groups = list(rollout_of(runner, [{}] * 8, samples=8).finished(engine))
    assert len(groups) == 8
    assert engine.num_answers == 3 * 64
    assert engine.num_calls <= 3 * 64 / 2


def test_a_process_that_dies_in_a_rollout_costs_its_culprit_alone():
    class Says(Engine):
        def words(self, request):
            is_culprit = "group 1 sample 1" in request.request_id
            return (
                "dies" if is_culprit and "turn 1" in request.request_id else super().words(request)
            )

    with environments("Dies", num_workers=1) as runner:
        groups = sorted(
            rollout_of(runner, [{}] * 3, max_turns=3).finished(Says()),
            key=lambda group: group.samples[0].group_id,
        )
        assert [group.rewards.tolist() for group in groups[::2]] == [[3.0, 3.0]] * 2
        assert groups[1].rewards[0] == 3.0
        assert groups[1].rewards[1].isnan()
        assert runner.num_failed == 1
