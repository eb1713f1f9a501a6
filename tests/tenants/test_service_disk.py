"""A service whose folder is on a disk that is full meanwhile: a real one, of a megabyte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import DiskFailed, ExitCode, RunFailed
from mrl.service.record import read_tenants
from mrl.service.registry import Registry
from mrl.toy_model import write_toy_model
from tests.disks import can_mount, mount_disk
from tests.ranks import run_ranks
from tests.tenants.parts import make_model, service, tenant
from tests.tenants.serving import LIMIT_S, Service, rows_of, wait_for

pytestmark = pytest.mark.skipif(not can_mount(), reason="this user may not mount a disk")


def fill(folder: Path) -> Path:
    """Write a file that takes all the room; return it."""
    file = folder / "fills"
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    return file


def states_on_a_full_disk(folder: Path, model: Path) -> list[Any]:
    mount_disk(folder / "service", 1 << 20)
    said: list[Any] = []
    with Registry(service(folder, model)) as registry:
        on_disk = lambda: [each.state for each in read_tenants(registry.root)]  # noqa: E731
        for name in ("a", "b"):
            registry.add(name, tenant(folder / name))
            registry.move(name, "running")
        file = fill(registry.root)
        said.append(registry.try_move(registry.get("a").incarnation, "paused", "why"))
        with suppress(DiskFailed):
            said.append(registry.move("b", "done"))
        said += [sorted(registry.kept), registry.write_kept(), registry.get("a").state, on_disk()]
        file.unlink()
        said += [registry.write_kept(), registry.write_kept(), on_disk()]
    return said


def test_a_state_that_the_disk_refuses_is_written_later(
    made_once: Callable[..., Path], tmp_path: Path
) -> None:
    model = made_once("tenants_model", make_model)
    (said,) = run_ranks(1, states_on_a_full_disk, tmp_path, model, folder=tmp_path / "rank")
    full = [True, ["a"], [], "paused", ["running", "running"]]
    assert said == [*full, ["a"], [], ["paused", "running"]]


def a_service_on_a_full_disk(folder: Path, model: Path) -> dict[str, Any]:
    """The disk is full when one tenant is done; another one works on."""
    made = Service(folder / "service", model)
    mount_disk(made.folder, 1 << 20)
    made.write()
    out = {name: str(folder / name) for name in ("ann", "bob")}
    made.add("ann", num_steps=3, output_dir=out["ann"])
    made.add("bob", num_steps=5, output_dir=out["bob"])
    process = made.start()
    log, rows = made.folder.with_suffix(".log"), made.folder / "metrics.jsonl"
    wait_for(lambda: rows.exists() and rows.read_bytes(), process)
    file = fill(made.folder)
    wait_for(lambda: made.client().tenant("bob")["state"] == "done", process)
    found: dict[str, Any] = {"full": made.states(), "said": log.read_text()}
    try:
        made.client().remove("ann")
    except RunFailed as error:
        found["refused"] = str(error)
    file.unlink()
    wait_for(lambda: {state for state, _ in made.states().values()} == {"done"}, process)
    process.terminate()
    found["code"] = process.wait(LIMIT_S)
    found["rows"] = len(rows.read_text().splitlines())
    found["steps"] = [row["step"] for row in rows_of(folder / "bob")]
    return found


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_a_service_goes_on_while_the_disk_of_its_folder_is_full(
    made_once: Callable[..., Path], tmp_path: Path
) -> None:
    model = made_once("toy", write_toy_model)
    (found,) = run_ranks(1, a_service_on_a_full_disk, tmp_path, model, folder=tmp_path / "rank")
    assert {state for state, _ in found["full"].values()} == {"running"}  # of both, on the disk
    for name in ("ann", "bob"):
        assert f"the state of tenant {name} (done) is only in memory: " in found["said"]
    assert found["said"].count("rows are left out until there is room") == 1
    assert "metrics.jsonl could not be written: the disk is full" in found["said"]
    assert "the disk is full" in found["refused"]
    assert found["code"] == ExitCode.SAVED
    assert found["steps"] == [0, 1, 2, 3, 4]
    assert 1 <= found["rows"] < 5
