"""The kernel's counters of processes that it ended for want of memory, in files that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.system.oom_killer import OomKills, read_oom_kills


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_counters_of_the_jobs_own_cgroup(tmp_path: Path, version: int) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "vmstat", "pgfault 12\noom_kill 7\n")
    if version == 2:
        write(proc / "self/cgroup", "0::/job_5/step_0\n")
        folder, events, limit = mount / "job_5", "memory.events", "memory.max"
    else:
        write(proc / "self/cgroup", "5:cpu:/x\n4:memory:/job_5/step_0\n")
        folder, events, limit = (
            mount / "memory/job_5",
            "memory.oom_control",
            "memory.limit_in_bytes",
        )
    write(folder / events, "oom 3\noom_kill 2\noom_group_kill 9\n")  # the step itself has no file
    write(folder / limit, "8000000000\n")
    before = read_oom_kills(proc, mount)
    assert before == OomKills(2, 7, "8.0 GB")
    assert before.since(before) == ("", False)
    write(folder / events, "oom_kill 3\n")
    text, is_own = read_oom_kills(proc, mount).since(before)
    assert is_own
    assert text.endswith("this job's cgroup reached its memory limit of 8.0 GB")


def test_without_a_cgroup_the_machine_says_less(tmp_path: Path) -> None:
    write(tmp_path / "vmstat", "oom_kill 7\n")
    after = read_oom_kills(tmp_path, tmp_path)
    assert after == OomKills(None, 7)
    text, is_own = after.since(OomKills(None, 6))
    assert "oom_kill in /proc/vmstat" in text
    assert not is_own
    assert read_oom_kills(tmp_path / "none", tmp_path).since(after) == ("", False)
