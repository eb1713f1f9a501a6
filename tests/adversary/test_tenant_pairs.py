"""All ordered pairs of {add, remove, pause, resume, kill, restart} of a tenant within one turn.

A tenant is its record and not its name. Whatever two changes come while the service is busy with a
turn, each run folder has the rows of that recipe alone, a session that was made anew begins at version
0 with nothing in its queue, one that goes on has the weights that it had, and all others keep their
bits.
`kill` is SIGKILL of the service, `restart` SIGTERM, each with a new start behind it.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mrl.client import Future, OperationFailed, OperationLost, ServiceClient, Session
from mrl.errors import InputError
from mrl.toy_model import write_toy_model
from tests.adversary.honest import digest_of
from tests.tenants.serving import Service, rows_of, wait_for

pytestmark = [pytest.mark.release, pytest.mark.timeout(1500)]

CHANGES = ("add", "remove", "pause", "resume", "kill", "restart")
NEXT = {
    "add": {"absent": "running"},
    "remove": {"running": "absent", "paused": "absent"},
    "pause": {"running": "paused"},
    "resume": {"paused": "running"},
    "kill": {"running": "running", "paused": "paused", "absent": "absent"},
    "restart": {"running": "running", "paused": "paused", "absent": "absent"},
}
"""What a change makes of a state; what is missing here is refused."""
BEFORE = {"add": "absent", "resume": "paused"}
"""The state that the first change of a pair finds, where it is not `running`."""
SIGNALS = {"kill": signal.SIGKILL, "restart": signal.SIGTERM}
NUM_STEPS, NUM_COMPARED = 100, 15
"""Steps of the recipe, which no pair sees the end of, and those whose rows are compared."""
WAIT_S = 200.0
LORA = {"rank": 4, "alpha": 8, "experts": "per_expert"}


class World:
    """A service with a session `zoe` that nobody touches, and a session and a recipe that change."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.process = self.started()
        self.client = ServiceClient(service.folder)
        self.zoe = self.session("zoe")
        self.runs = 0
        self.state = {"ses": "absent", "rec": "absent"}
        self.folders: list[Path] = []
        """Every run folder of the recipe."""

    def started(self) -> subprocess.Popen[bytes]:
        (self.service.folder / "control.sock").unlink(missing_ok=True)
        process = self.service.start()
        wait_for((self.service.folder / "control.sock").exists, process)
        return process

    def session(self, name: str, folder: str = "") -> Session:
        output = self.service.run_of(folder or name)
        return self.client.create_session(name, output_dir=output, lora=LORA, seed=7)

    def change(self, name: str, change: str) -> None:
        """Make a change of one tenant; what its state does not allow must be refused."""
        after = NEXT[change].get(self.state[name])
        try:
            self._change(name, change)
        except InputError:
            assert after is None, f"{change} of {name}, which is {self.state[name]}, was refused"
            return
        assert after is not None, f"{change} of {name}, which is {self.state[name]}, was accepted"
        self.state[name] = after

    def _change(self, name: str, change: str) -> None:
        if change != "add":
            getattr(self.client.control, change)(name)
            return
        self.runs += 1
        folder = f"{name}_{self.runs}"
        if name == "ses":
            self.session(name, folder)
            return
        output = self.service.run_of(folder)
        recipe = self.service.recipe(name, NUM_STEPS, output_dir=str(output))
        self.client.control.add(name, recipe)
        self.folders.append(output)

    def end(self, number: int) -> None:
        """End the service by a signal, and start it again."""
        self.process.send_signal(number)
        self.process.wait(WAIT_S)
        self.process = self.started()

    def wait_state(self, name: str) -> None:
        wanted = self.state[name]

        def holds() -> bool:
            found = {each["name"]: each["state"] for each in self.client.control.tenants()}
            return found.get(name, "absent").replace("queued", "running") == wanted

        wait_for(holds, self.process)


@contextmanager
def world(folder: Path, model: Path) -> Iterator[World]:
    folder.mkdir(exist_ok=True)
    service = Service(folder / "service", model)
    service.write()
    made = World(service)
    try:
        yield made
    finally:
        made.process.send_signal(signal.SIGTERM)
        made.process.wait(WAIT_S)


def drawn(session: Session) -> str:
    """Return a digest of samples and log-probs under the present weights."""
    answers = session.sample([[5, 6, 7], [8, 9]], n=2, max_tokens=8, seed=3).result(WAIT_S)
    return digest_of([answers, session.forward([[5, 6, 7, 8, 9, 10]]).result(WAIT_S)])


def teach(session: Session) -> None:
    """Take one optimizer step, which any weights and gradients of others would change."""
    (answers,) = session.sample([[5, 6, 7]], n=4, max_tokens=8, seed=1).result(WAIT_S)
    session.forward_backward([a.datum(n - 1.4, 1 / 4) for n, a in enumerate(answers)], "ppo")
    session.optim_step().result(WAIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy_model(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows of the recipe, and what a session draws before and after its first step, with nobody beside
    them."""
    folder = tmp_path_factory.mktemp("alone")
    service = Service(folder / "recipe", model)
    service.write()
    service.add("rec", num_steps=NUM_COMPARED)
    service.train_alone("rec", folder / "rec")
    with world(folder / "session", model) as one:
        new = drawn(one.zoe)
        teach(one.zoe)
        return {"rows": rows_of(folder / "rec"), "new": new, "taught": drawn(one.zoe)}


@pytest.mark.parametrize("first", CHANGES)
def test_pairs_of_changes_within_a_turn(
    first: str, model: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    with world(tmp_path, model) as found:
        for second in CHANGES:
            for name in ("ses", "rec"):
                run_pair(found, name, first, second, alone)
        for folder in found.folders:
            check_rows(folder, alone["rows"])


def run_pair(found: World, name: str, first: str, second: str, alone: dict[str, Any]) -> None:
    """Bring a tenant to its state before, make both changes in one turn, and look at what is left."""
    what = f"{first} + {second} of {name}"
    prepare(found, name, BEFORE.get(first, "running"), alone)
    began, life = found.runs, None
    waiting: list[Future[Any]] = []
    if name == "ses" and found.state[name] == "running":
        session = found.client.session("ses")
        life = session.life
        waiting = [session.sample([[5, 6]], n=16, max_tokens=30) for _ in range(3)]
    # The turn that the changes fall into.
    busy = found.zoe.sample([[5, 6, 7]], n=48, max_tokens=40, seed=5)
    for change in (first, second):
        if change in SIGNALS:
            found.end(SIGNALS[change])
        else:
            found.change(name, change)
    found.wait_state(name)
    if {first, second} & SIGNALS.keys():
        found.zoe = found.client.session("zoe")
        found.zoe.wait_open(WAIT_S)
    else:
        digest = digest_of(busy.result(WAIT_S))
        assert digest == alone.setdefault("busy", digest), f"{what} changed the bits of another"
    if name == "ses" and found.state[name] == "running":
        check_session(found, what, life, waiting, is_new=found.runs > began, alone=alone)


def prepare(found: World, name: str, wanted: str, alone: dict[str, Any]) -> None:
    """Bring the tenant to a state; a session that runs or is paused has taken and saved one step."""
    if found.state[name] != "absent":
        found.change(name, "remove")
        found.wait_state(name)
    if wanted == "absent":
        return
    found.change(name, "add")
    if name == "ses":
        session = found.client.session("ses")
        assert drawn(session) == alone["new"], "a session that was made anew has weights already"
        teach(session)
        session.save().result(WAIT_S)
    else:
        folder = found.folders[-1]
        wait_for((folder / "metrics.jsonl").exists, found.process)
    if wanted == "paused":
        found.change(name, "pause")
        found.wait_state(name)


def check_session(
    found: World,
    what: str,
    life: str | None,
    waiting: list[Future[Any]],
    *,
    is_new: bool,
    alone: dict[str, Any],
) -> None:
    session = found.client.session("ses")
    assert session.wait_open(WAIT_S) == (0 if is_new else 1), what
    assert session.life != life, what
    for each in waiting:
        lost_or_done(each, what, must_be_lost=is_new)
    assert drawn(session) == alone["new" if is_new else "taught"], what
    assert session.version == (0 if is_new else 1), what
    assert session.status()["session"]["queued"] == 0, what


def lost_or_done(future: Future[Any], what: str, *, must_be_lost: bool) -> None:
    """Assert that an operation of an earlier life is over; of a removed tenant there is no trace."""
    try:
        future.result(WAIT_S)
    except (OperationLost, OperationFailed, InputError):
        return
    assert not must_be_lost, f"{what}: the new tenant answers for the old one"


def check_rows(folder: Path, wanted: list[dict[str, Any]]) -> None:
    """Assert that a run has the first rows of the recipe alone, whatever became of it."""
    if not (folder / "metrics.jsonl").exists():
        return
    but = {"rollout/engine_restarts"}
    for mine, other in zip(rows_of(folder), wanted, strict=False):
        different = {k for k in mine.keys() | other.keys() if mine.get(k) != other.get(k)} - but
        assert not different, folder
