"""phase.json: what the monitor writes, and what a reader makes of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.run import phase_file
from mrl.run.phase_file import ENDED, FILE, PhaseFile, is_gone, read_phase
from mrl.system.heartbeat import Pulse, Samples
from tests.waiting import wait_until


def written(folder: Path, **wanted: Any) -> dict[str, Any]:
    """The content of the file, once it has these values."""

    def has_them() -> bool:
        found = read_phase(folder)
        return found is not None and found | wanted == found

    wait_until(has_them, f"{wanted} in {FILE}")
    found = read_phase(folder)
    assert found is not None
    return found


def test_phases_and_samples_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_file, "MIN_GAP_S", 0.0)
    phases = PhaseFile(tmp_path, os.getpid())
    phases.note(Pulse("sync", 3, 0, 0), [Samples()])
    phases.note(Pulse("rollout", 3, 1, 0), [Samples(3, 8), Samples(4, 8)])
    found = written(tmp_path, phase="rollout", finished=7, wanted=16)
    assert [span[0] for span in found["spans"]] == ["sync", "rollout"]
    assert found["spans"][0][2] == found["spans"][1][1] == found["since"]
    assert not is_gone(found)
    phases.note(Pulse("train", 4, 2, 0, "ann"), [Samples()])
    assert [span[0] for span in written(tmp_path, tenant="ann", step=4)["spans"]] == ["train"]
    phases.close()
    assert written(tmp_path, phase=ENDED)["step"] == 4
    assert not list(tmp_path.glob(".*"))


def test_it_is_written_seldom_and_still_shows_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_file, "MIN_GAP_S", 0.2)
    monkeypatch.setattr(phase_file, "SIGN_S", 0.5)
    phases, times = PhaseFile(tmp_path, os.getpid()), set()
    end = time.monotonic() + 1.2
    number = 0
    while time.monotonic() < end:
        number += time.monotonic() < end - 0.7
        phases.note(Pulse("rollout", 0, 0, 0), [Samples(number, 10**6)])
        if (found := read_phase(tmp_path)) is not None:
            times.add(found["time"])
        time.sleep(0.002)
    phases.close()
    assert 3 <= len(times) <= 6


def test_a_folder_that_is_gone_and_a_full_disk_harm_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    phases = PhaseFile(folder, os.getpid())
    shutil.rmtree(folder)
    phases.note(Pulse("rollout", 0, 0, 0), [])
    phases.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"phase": "train"}', "\xff", '{"phase": 1}', "[" * 100_000],
)
def test_a_damaged_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="latin-1")
    assert read_phase(tmp_path) is None


def test_a_killed_process_is_gone_and_one_elsewhere_is_not_known(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    phases = PhaseFile(tmp_path, process.pid)
    phases.note(Pulse("train", 0, 0, 0), [])
    found = written(tmp_path, phase="train")
    assert not is_gone(found)
    process.kill()
    process.wait()
    assert is_gone(found)
    assert not is_gone(found | {"host": "another"})
    assert is_gone(found | {"pid": os.getpid()})  # the number was given to another process
    assert is_gone(found | {"pid": 10**30})
    phases.close()
    assert json.loads((tmp_path / FILE).read_text())["phase"] == ENDED
