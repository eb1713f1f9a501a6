"""A tenant is its record and not its name: whatever users do within one turn of the service, a run
serves the record that it was opened for, and nothing of it is the next one's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.errors import InputError
from mrl.service.colocated import ColocatedService
from mrl.service.crashes import Crashes
from mrl.service.record import Loop, engine_name, name_of
from mrl.service.registry import Registry, WrongState
from mrl.service.schedule import TrainingQueue
from mrl.service.service import Service
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.operations import Operations, OtherLife
from tests.ranks import run_ranks
from tests.tenants.parts import make_model, service, session, tenant

ACTIONS = ("add", "remove", "pause", "resume", "kill", "restart")
SOME = [("", "remove", "add"), ("", "pause", "resume"), ("pause", "resume", "kill")]
ALL = list(itertools.product(("", "pause", "remove"), ACTIONS, ACTIONS))
"""What happens within one turn to a tenant that runs."""
SAVE = read_body({"kind": "save"}, Bounds(10, 10))


class FakeRun:
    """A run without a model, which notes how it ended."""

    is_done = is_over = trains = False
    wants_turn = True
    step = 0

    def __init__(self, incarnation: str, recipe: Recipe, operations: Operations | None) -> None:
        self.name, self.incarnation, self.recipe = name_of(incarnation), incarnation, recipe
        self.operations, self.end = operations, ""
        if operations is not None:
            operations.begin(incarnation, 7)

    def note_waiting(self, waiting_tokens: int) -> None:
        self.waiting_tokens = waiting_tokens

    def leave(self) -> None:
        self.end = "left"
        if self.operations is not None:
            self.operations.end(self.incarnation)

    def close(self) -> None:
        self.end = self.end or "closed"


class FakeEngines:
    """Engines that such runs do not use."""

    def start(self, base: object) -> None: ...

    def close(self) -> None: ...


class FakeService(Service):
    """The loop of a service over such runs."""

    def __init__(self, config: ServiceConfig, registry: Registry) -> None:
        shared = SimpleNamespace(config=config, engines=FakeEngines(), base=None, bytes_held=str)
        super().__init__(cast(Any, shared), registry, lambda row: None)
        self.all: list[FakeRun] = []

    def run_turn(self) -> None: ...

    def _new_run(self, incarnation: str, weight: float, recipe: Recipe) -> FakeRun:
        return self._made(FakeRun(incarnation, recipe, None))

    def _new_session(self, incarnation: str, weight: float, recipe: Recipe) -> FakeRun:
        assert self._registry is not None
        return self._made(FakeRun(incarnation, recipe, self._registry.operations))

    def _made(self, run: FakeRun) -> FakeRun:
        self.all.append(run)
        return run


class World:
    """A service folder with one tenant, which runs, and the service that has it open."""

    def __init__(self, folder: Path, model: Path, loop: Loop) -> None:
        self.folder = folder
        self.loop: Loop = loop
        self.config = service(folder, model)
        self.numbers = itertools.count()
        self.start()
        self.add()
        self.service.follow_registry()

    def start(self) -> None:
        self.registry = Registry(self.config)
        self.service = FakeService(self.config, self.registry)

    def add(self) -> None:
        output = self.folder / f"run{next(self.numbers)}"
        keys = session(output) if self.loop == "client" else tenant(output)
        self.registry.add("a", keys, loop=self.loop)

    def do(self, action: str) -> None:
        """Do what a user or an operator does. Raises InputError for what the state does not allow."""
        states = {"remove": "removed", "pause": "paused", "resume": "queued"}
        if action == "add":
            self.add()
        elif action in states:
            self.registry.move("a", cast(Any, states[action]))
        else:
            if action == "restart":
                for run in self.service._runs.values():
                    run.leave()
            self.registry.close()
            self.start()


def after_each(
    turns: Sequence[tuple[str, ...]], folder: Path, model: Path, loop: Loop
) -> list[str]:
    """What is wrong after each of these turns."""
    dist.init_process_group("gloo")
    wrong: list[str] = []
    for number, turn in enumerate(turns):
        world = World(folder / str(number), model, loop)
        operation, before = "", world.registry.get("a")
        if loop == "client":
            operation = world.registry.operations.post(before.incarnation, SAVE)
        for action in filter(None, turn):
            try:
                world.do(action)
            except InputError as error:
                if not isinstance(error, WrongState) and "there is a tenant a" not in str(error):
                    raise
        world.service.follow_registry()
        wrong += [f"{turn}: {each}" for each in problems(world)]
        now = world.registry.get("a")
        if operation:
            is_same = now.incarnation == before.incarnation and now.state == "running"
            is_new_process = {"kill", "restart"} & set(turn)
            expected = "queued" if is_same and not is_new_process else "lost"
            found = world.registry.operations.look("a", operation)["state"]
            wrong += [] if found == expected else [f"{turn}: {found}, expected {expected}"]
        world.registry.close()
    return wrong


def problems(world: World) -> list[str]:
    """What does not hold between the records and the runs of a service."""
    found: list[str] = []
    record, runs = world.registry.get("a"), world.service._runs
    if record.state not in ("running", "paused", "removed"):
        found.append(f"the tenant is {record.state}")
    if (record.state == "running") != ("a" in runs):
        found.append(f"the tenant is {record.state}, runs: {list(runs)}")
    for run in world.service.all:
        is_current = run is runs.get("a")
        if is_current and run.incarnation != record.incarnation:
            found.append(f"{run.incarnation} serves {record.incarnation}")
        if is_current and run.recipe.output_dir != record.output_dir:
            found.append(f"{run.recipe.output_dir} is trained for {record.output_dir}")
        if is_current == bool(run.end):
            found.append(f"{run.incarnation} is {run.end or 'open'}")
    return found


@pytest.mark.parametrize("loop", ["recipe", "client"])
@pytest.mark.parametrize("turns", [SOME, pytest.param(ALL, marks=pytest.mark.release)])
def test_whatever_happens_within_one_turn_a_run_serves_its_record(
    made_once: Callable[..., Path], tmp_path: Path, turns: list[tuple[str, ...]], loop: Loop
) -> None:
    model = made_once("tenants_model", make_model)
    (wrong,) = run_ranks(1, after_each, turns, tmp_path, model, loop, folder=tmp_path / "rank")
    assert wrong == []


def fails_late(folder: Path, model: Path) -> dict[str, Any]:
    """A run fails, and one ends, after its name has become another's."""
    dist.init_process_group("gloo")
    world = World(folder, model, "recipe")
    run = world.service._runs["a"]
    world.do("remove")
    world.do("add")
    world.service._pause(run, "it failed")
    failed = world.registry.get("a").state
    world.service.follow_registry()
    run = world.service._runs["a"]
    world.do("pause")
    world.do("resume")
    world.service._finish(run)
    found = {"failed": failed, "finished": world.registry.get("a").state}
    world.registry.close()
    return found


def test_how_a_run_ends_is_noted_in_no_other_record(
    made_once: Callable[..., Path], tmp_path: Path
) -> None:
    model = made_once("tenants_model", make_model)
    (found,) = run_ranks(1, fails_late, tmp_path, model, folder=tmp_path / "rank")
    assert found == {"failed": "queued", "finished": "queued"}


class WithoutText(Exception):
    """An error of a tenant's code whose text cannot be read."""

    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_every_error_pauses_its_tenant_and_no_error_ends_the_service(
    made_once: Callable[..., Path], tmp_path: Path
) -> None:
    """Whatever its text is: none, one that no file can have, or one that raises an error."""
    world = World(tmp_path, made_once("tenants_model", make_model), "recipe")
    for error, reason in (
        (NotImplementedError(), "NotImplementedError"),
        (ValueError(" "), "ValueError"),
        (ValueError("no \udce9"), "no \\udce9"),
        (KeyError("a"), "KeyError: 'a'"),
        (WithoutText(), "WithoutText: its str() raises KeyError"),
    ):
        run = world.service._runs["a"]

        def fail(error: Exception = error) -> None:
            raise error

        assert not world.service._attempt(run, fail)
        record = world.registry.get("a")
        assert (record.state, record.reason) == ("paused", reason)
        assert run.end == "closed"
        world.do("resume")
        world.service.follow_registry()
    world.registry.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [SystemExit(3), WithoutText()])
def test_a_run_that_cannot_be_closed_ends_no_other(
    made_once: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    world = World(tmp_path, made_once("tenants_model", make_model), "recipe")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(world.service.all[-1], "close", fail)
    world.service._pause(world.service._runs["a"], "it failed")
    world.do("resume")
    with monkeypatch.context() as patch:  # it cannot be opened on another rank
        patch.setattr(FakeRun, "close", fail)
        patch.setattr(world.service._consensus, "first", lambda *_, **__: "no room")
        world.service.follow_registry()
    record = world.registry.get("a")
    assert (record.state, record.reason, world.service._runs) == ("paused", "no room", {})
    world.do("resume")
    world.service.follow_registry()
    monkeypatch.setattr(FakeRun, "close", fail)
    world.service.close()
    world.registry.close()


@pytest.mark.usefixtures("alone")
def test_a_clock_that_is_set_back_changes_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training queue compares times."""
    wall_clock = itertools.count(1e9, -3600.0)
    monkeypatch.setattr(time, "time", lambda: next(wall_clock))
    queue = TrainingQueue(1e-3)
    queue.join("a")
    fake: Any = SimpleNamespace(_queue=queue, _is_main=True, _base=SimpleNamespace(onload=str))
    fake._next = partial(Service._next, fake)
    fake._train = lambda name: queue.done(1.0)
    for _ in range(2):
        waits = ColocatedService._train_all(fake, [cast(Any, SimpleNamespace(name="a"))])
        assert 0 <= waits["a"] < 60


def test_ends_of_the_service_count_for_the_record(
    made_once: Callable[..., Path], tmp_path: Path
) -> None:
    config = service(tmp_path, made_once("tenants_model", make_model))
    for number in range(3):
        with Registry(config) as registry:
            if not number:
                registry.add("a", tenant(tmp_path / "a"))
            # Its work is under way, and the process ends.
            Crashes(registry.root).begin(registry.get("a").incarnation, 1)
    with Registry(config) as registry:
        assert registry.get("a").state == "paused"
        registry.move("a", "queued")
        assert registry.get("a").resumed == 1


def test_a_client_that_names_the_number_changes_no_other_tenant(
    made_once: Callable[..., Path], tmp_path: Path
) -> None:
    with Registry(service(tmp_path, made_once("tenants_model", make_model))) as registry:
        first = registry.add("a", tenant(tmp_path / "a"))
        registry.move("a", "removed", number=first.sequence)
        registry.add("a", tenant(tmp_path / "b"))
        for state in ("paused", "removed"):
            with pytest.raises(WrongState, match="now has the sequence 2, expected 1"):
                registry.move("a", cast(Any, state), number=first.sequence)


def test_a_session_that_leaves_takes_nothing_more(tmp_path: Path) -> None:
    queue = Operations()
    operations = [queue.post("1-0-a", SAVE) for _ in range(2)]
    queue.begin("1-0-a", 0)
    queue._lives["1-0-a"].waiting[0].state = "running"
    queue.close("1-0-a")
    assert [queue.look("a", each)["state"] for each in operations] == ["running", "lost"]
    with pytest.raises(OtherLife, match="was opened again or closed"):
        queue.post("1-0-a", SAVE)
    again = queue.post("1-1-a", SAVE)
    assert queue.take("1-0-a")[0].id == operations[0]  # what is under way goes on
    queue.answer("1-0-a", operations[0], result={}, version=1)
    queue.end("1-0-a")
    states = [queue.look("a", each)["state"] for each in (*operations, again)]
    assert states == ["done", "lost", "queued"]


def test_incarnations_have_names_of_their_own_in_the_engine() -> None:
    long = "x" * 63
    names = [engine_name(f"{number}-0-{long}") for number in range(1, 2000)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) == 63
    assert name_of("12-3-a-b") == "a-b"
