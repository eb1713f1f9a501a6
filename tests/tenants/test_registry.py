"""The registry of tenants: its states, its names and folders, and what kill -9 leaves of it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config import ServiceConfig, load_recipe
from mrl.errors import InputError
from mrl.service import agreement
from mrl.service.crashes import MAX_ENDS, REASON
from mrl.service.record import describe, newest_row, read_past, read_tenants
from mrl.service.registry import NoTenant, Registry, WrongState
from tests.tenants.parts import service, tenant


@pytest.fixture
def registry(tmp_path: Path, model: Path) -> Iterator[Registry]:
    with Registry(service(tmp_path, model)) as made:
        yield made


def reopened(old: Registry) -> Registry:
    old.close()
    return Registry(old.service)


def test_a_tenant_survives_a_restart(registry: Registry, tmp_path: Path) -> None:
    added = registry.add("a", tenant(tmp_path / "run"), weight=2.5)
    assert (added.state, added.sequence, added.weight) == ("queued", 1, 2.5)
    registry.add("b", tenant(tmp_path / "other"))
    registry.move("a", "running")
    registry.move("b", "paused", "its data\nis bad")
    with reopened(registry) as again:
        assert [(t.name, t.state, t.reason) for t in again.tenants()] == [
            ("a", "running", ""),
            ("b", "paused", "its data is bad"),
        ]
        assert again.recipe("a") == load_recipe(again.root / "tenants/a/recipe.yaml")
        assert again.recipe("a").output_dir == str(tmp_path / "run")
        assert again.move("b", "queued").reason == ""


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (["running", "paused", "queued", "running", "done", "removed"], True),
        (["paused", "done"], True),
        (["removed", "queued"], False),
        (["queued"], False),
        (["done", "queued"], False),
        (["running", "queued"], False),
    ],
)
def test_states(registry: Registry, tmp_path: Path, path: list, allowed: bool) -> None:
    registry.add("a", tenant(tmp_path / "run"))
    for state in path[:-1]:
        registry.move("a", state)
    if allowed:
        assert registry.move("a", path[-1]).state == path[-1]
    else:
        with pytest.raises(WrongState, match=f"it cannot become {path[-1]} from there"):
            registry.move("a", path[-1])
    assert registry.try_move(registry.get("a").incarnation, registry.get("a").state) is False
    with pytest.raises(NoTenant, match="there is no tenant 'c'"):
        registry.move("c", "paused")


@pytest.mark.parametrize(
    "name", ["", "A", "-a", "a/b", "..", "../a", "a" * 64, "a b", "ä", "a\n", ".new", None, 3]
)
def test_bad_names(registry: Registry, tmp_path: Path, name: Any) -> None:
    with pytest.raises(InputError, match="the name of a tenant is"):
        registry.add(name, tenant(tmp_path / "run"))
    assert not registry.tenants()


def test_output_dirs_of_tenants_lie_apart(registry: Registry, tmp_path: Path) -> None:
    registry.add("a", tenant(tmp_path / "run"))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    root = registry.root
    for place, says in (
        (tmp_path / "run", "that of tenant a"),
        (tmp_path / "run/inner", "that of tenant a"),
        (tmp_path / "x/../run", "that of tenant a"),
        (tmp_path / "link/inner", "that of tenant a"),
        (tmp_path, "the service folder"),
        (root, "the service folder"),
        (root / "tenants/b", "the service folder"),
        (root / "runs", "the service folder"),
        (root / "runs/../logs", "the service folder"),
    ):
        with pytest.raises(InputError, match=says):
            registry.add("b", tenant(place))
    with pytest.raises(InputError, match="expected an absolute path"):
        registry.add("b", tenant(Path("run")))
    registry.add("b", tenant(root / "runs/b"))
    with pytest.raises(InputError, match="there is a tenant a already"):
        registry.add("a", tenant(tmp_path / "elsewhere"))


def test_a_removed_name_comes_again_only_with_another_folder(
    registry: Registry, tmp_path: Path
) -> None:
    registry.add("a", tenant(tmp_path / "run"))
    registry.move("a", "removed")
    assert not registry.tenants()
    with pytest.raises(InputError, match=r"its adapters a@1, a@2 \.\.\. would be other ones"):
        registry.add("a", tenant(tmp_path / "run"))
    assert registry.add("a", tenant(tmp_path / "second")).sequence == 2
    registry.move("a", "removed")
    registry.add("a", tenant(tmp_path / "last"))
    registry.move("a", "removed")
    with pytest.raises(InputError, match="holds the run of the tenant a that was removed"):
        registry.add("a", tenant(tmp_path / "second"))
    with reopened(registry) as again:
        with pytest.raises(InputError, match="holds the run of the tenant a that was removed"):
            again.add("a", tenant(tmp_path / "run"))
        assert again.add("b", tenant(tmp_path / "run")).sequence == 4
        assert again.add("a", tenant(tmp_path / "new")).sequence == 5
        assert [past.output_dir for past in read_past(again.root)] == [
            str(tmp_path / name) for name in ("run", "second", "last")
        ]


def test_a_service_is_full(tmp_path: Path, model: Path) -> None:
    with Registry(service(tmp_path, model, tenants={"max_number": 1})) as registry:
        registry.add("a", tenant(tmp_path / "a"))
        with pytest.raises(InputError, match=r"tenants\.max_number=1"):
            registry.add("b", tenant(tmp_path / "b"))
        registry.move("a", "done")
        registry.add("b", tenant(tmp_path / "b"))


@pytest.mark.parametrize("weight", [0.0, -1.0, 5e-324, float("nan"), float("inf"), 2e6])
def test_bad_weights(registry: Registry, tmp_path: Path, weight: float) -> None:
    with pytest.raises(InputError, match="expected a number from 1e-06 to"):
        registry.add("a", tenant(tmp_path / "a"), weight=weight)


def test_two_services_do_not_open_one_folder(registry: Registry) -> None:
    with pytest.raises(InputError, match="is in use by a running service"):
        Registry(registry.service)


def test_links_and_damage_are_named(registry: Registry, tmp_path: Path) -> None:
    registry.add("a", tenant(tmp_path / "a"))
    registry.close()
    place = registry.root / "tenants"
    (place / "b").symlink_to(tmp_path)
    with pytest.raises(InputError, match="tenants/b is not a folder of its own"):
        Registry(registry.service)
    (place / "b").unlink()
    state = (place / "a/state.json").read_text()
    for damaged in (state[:-9], state.replace("queued", "lost"), "[]", "", '{"name": "a"}'):
        (place / "a/state.json").write_text(damaged)
        with pytest.raises(InputError, match=r"a/state\.json is damaged") as error:
            Registry(registry.service)
        assert "\n" not in str(error.value)
    (place / "a/state.json").unlink()
    (tmp_path / "elsewhere").write_text(state)
    (place / "a/state.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is damaged"):
        read_tenants(registry.root)


def test_a_reason_that_no_file_can_have_is_escaped(registry: Registry, tmp_path: Path) -> None:
    """It may quote an error of the tenant's code."""
    registry.add("a", tenant(tmp_path / "a"))
    assert registry.try_move(registry.get("a").incarnation, "paused", "no \udce9")
    with reopened(registry) as again:
        assert again.get("a").reason == "no \\udce9"


def test_a_state_that_cannot_be_written_for_any_reason_is_kept(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        registry.add(name, tenant(tmp_path / name))
    folder = registry.root / "tenants/a"
    folder.rename(tmp_path / "away")  # an administrator has moved it
    assert registry.try_move(registry.get("a").incarnation, "running")

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "state.json")

    with monkeypatch.context() as patch:
        patch.setattr("mrl.service.registry.write_whole", refused)
        assert registry.try_move(registry.get("b").incarnation, "paused", "why")
        assert registry.write_kept() == []
    assert [each.state for each in registry.tenants()] == ["running", "paused"]
    assert "Permission denied" in registry.kept["b"]
    assert registry.write_kept() == ["b"]
    (tmp_path / "away").rename(folder)
    assert registry.write_kept() == ["a"]
    assert [each.state for each in read_tenants(registry.root)] == ["running", "paused"]


def test_tenants_that_no_longer_agree_are_paused(tmp_path: Path, model: Path) -> None:
    with Registry(service(tmp_path, model)) as registry:
        registry.add("a", tenant(tmp_path / "a"))
        registry.add("b", tenant(tmp_path / "b", lora={"rank": 8}))
    other = service(tmp_path, model, lora={"max_rank": 4}, rollout={"max_total_tokens": 99})
    with Registry(other) as registry:
        a, b = registry.tenants()
        assert (a.state, b.state) == ("queued", "paused")
        assert "lora.rank is 8, but the service has lora.max_rank=4" in b.reason
        with pytest.raises(InputError, match="max_rank=4"):
            registry.move("b", "queued")
        stored = yaml.safe_load((registry.root / "tenants/a/recipe.yaml").read_text())
        assert stored["rollout"]["max_total_tokens"] == 99


class Ended(BaseException):
    """Stands for the end of the process."""


def test_a_tenant_whose_code_ends_every_start_is_paused(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add("a", tenant(tmp_path / "a"))
    registry.add("b", tenant(tmp_path / "b", algorithm={"name": "grpo"}))
    real = agreement.load_algorithm

    def load(name: str) -> Any:
        if name == "grpo":
            raise Ended
        return real(name)

    monkeypatch.setattr(agreement, "load_algorithm", load)
    for _ in range(MAX_ENDS):
        with pytest.raises(Ended):
            reopened(registry)
    with reopened(registry) as again:
        assert [tenant.state for tenant in again.tenants()] == ["queued", "paused"]
        assert again.get("b").reason == REASON
        with pytest.raises(Ended):
            again.move("b", "queued")
    monkeypatch.undo()
    with reopened(again) as once_more:
        assert once_more.move("b", "queued").state == "queued"


def test_progress_is_read_from_the_run(registry: Registry, tmp_path: Path) -> None:
    added = registry.add("a", tenant(tmp_path / "a"))
    assert describe(added)["steps_done"] == 0
    (tmp_path / "a").mkdir()
    lines = [json.dumps({"step": step, "reward/mean": step / 2}) for step in range(3)]
    (tmp_path / "a/metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "rew')
    assert describe(added)["steps_done"] == 3
    assert newest_row(tmp_path / "a") == {"step": 2, "reward/mean": 1.0}
    for odd in ("[1]", '{"step": "x"}', '{"step": NaN}', "[" * 100_000, "3"):
        with (tmp_path / "a/metrics.jsonl").open("a") as file:
            file.write(f"\n{odd}\n")
        assert describe(added)["steps_done"] == 3
    (tmp_path / "a/metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "a/metrics.jsonl")
    assert describe(added)["steps_done"] == 0


def test_threads_of_one_name(registry: Registry, tmp_path: Path) -> None:
    made: list[int] = []

    def add(number: int) -> None:
        with contextlib.suppress(InputError):
            made.append(registry.add("a", tenant(tmp_path / str(number))).sequence)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def change_tenants(ours: ServiceConfig, pipe: int) -> None:
    """Add, run and remove tenants until somebody kills this process; each change is told when done."""
    with Registry(ours) as registry:
        for number in itertools.count():
            for old in registry.tenants():
                registry.move(old.name, "removed")
                os.write(pipe, f"removed {old.name}\n".encode())
            name, place = f"t{number % 2}", registry.root / "runs" / str(time.time_ns())
            registry.add(name, tenant(place))
            os.write(pipe, f"queued {name}\n".encode())
            registry.move(name, "running")
            os.write(pipe, f"running {name}\n".encode())


def killed(ours: ServiceConfig, after_s: float) -> list[list[str]]:
    """What a process told before it was killed, that many seconds after its first change."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            change_tenants(ours, writes)
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as stream:
        lines = [stream.readline()]
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [line.split() for line in (*lines, *stream.read().splitlines())]


def test_kill_9_leaves_every_change_whole(tmp_path: Path, model: Path) -> None:
    ours = service(tmp_path, model)
    rng, told = random.Random(20), 0
    for _ in range(10):
        lines = killed(ours, rng.uniform(0.0, 0.15))
        told += len(lines)
        state, name = lines[-1]
        with Registry(ours) as registry:
            present = {each.name: each.state for each in registry.tenants()}
            after = {"queued": ("queued", "running"), "running": ("running", "removed")}
            if state != "removed":
                assert present.get(name, "removed") in after[state]
            assert len(present) <= 1
            for each in present:
                registry.recipe(each)
            everyone = [*read_tenants(registry.root), *read_past(registry.root)]
            assert sorted(t.sequence for t in everyone) == list(range(1, len(everyone) + 1))
            assert not list((registry.root / "tenants").glob(".*.new"))
    assert told > 20
