"""Rewards of tenants as another user: what is refused, and what a hostile one manages."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config import EnvironmentConfig
from mrl.environments.episodes import EpisodeFailed, Start
from mrl.environments.runner import EnvironmentRunner
from mrl.errors import InputError
from mrl.rewards.worker_calls import call_worker, reward_worker
from mrl.service.reward_user import prepare_reward_user
from mrl.system.worker_user import worker_user
from mrl.toy_model import write_toy_model
from mrl.types import Prompt
from tests.environments.playing import Playing
from tests.tenants import hostile
from tests.tenants.serving import ROOT, Service, wait_for
from tests.waiting import LIMIT_S, wait_until

USER = "nobody"
UID, GID = pwd.getpwnam(USER)[2:4]
ENVIRONMENT = """
import os
from mrl.environments import StepResult
class Who:
    def reset(self, prompt, seed, **columns): return None
    def step(self, action): return StepResult(reward=os.getuid(), done=True)
"""


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that every user may run, in the place of the tests' own, with the same packages."""
    if os.geteuid():
        pytest.skip("only root can start processes as another user")
    path = f"{ROOT}:{sysconfig.get_path('purelib')}"
    monkeypatch.setenv("PYTHONPATH", path)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for found in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            done = subprocess.run(
                [found, "-c", "import mrl.rewards.worker"],
                user=UID, group=GID, extra_groups=[], cwd="/", capture_output=True, check=False,
            )  # fmt: skip
        except OSError:
            continue
        if not done.returncode:
            monkeypatch.setattr(sys, "executable", found)
            return found
    pytest.skip(f"{USER} may run no {version} with the packages of mrl")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may read; those of pytest are closed."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    (folder / "out").mkdir()
    (folder / "out").chmod(0o777)
    shutil.copy(hostile.__file__, folder / "hostile.py")
    yield folder
    shutil.rmtree(folder)


def left_behind() -> list[int]:
    """The processes that the hostile reward has left behind and that live."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if hostile.MARK.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def wait_until_none_is_left() -> None:
    wait_until(lambda: not left_behind(), "the end of what a worker has started")


def test_users_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="has no such user; give one of /etc/passwd"):
        worker_user("no-such-user")
    assert worker_user(None) is None
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert worker_user("root") is None
    assert worker_user(USER) is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match=r"only root can start workers .* belongs to 12345; leave"):
        worker_user(USER)


def test_root_is_warned_where_it_names_no_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    prepare_reward_user("root", is_main=True)
    prepare_reward_user(None, is_main=False)
    assert not capsys.readouterr().out
    prepare_reward_user(None, is_main=True)
    assert "run as root" in " ".join(capsys.readouterr().out.split())


def test_a_hostile_reward_manages_nothing(python: str, public: Path) -> None:
    service, run = public / "service", public / "run"
    for folder in (service, run / "rollouts"):
        folder.mkdir(parents=True)
        folder.chmod(0o700)
    run.chmod(0o700)
    report = public / "out/report.json"
    worker = reward_worker(f"{public}/hostile.py:reward", 30.0, worker_user(USER))
    request = {
        "prompts": ["p"],
        "completions": ["abc"],
        "columns": {"where": [f"{service}|{run}|{report}"]},
    }
    try:
        assert call_worker(worker, request, LIMIT_S) == {"rewards": [3.0]}
        wait_until(left_behind, "a process of the hostile reward")
    finally:
        worker.close()
    wait_until_none_is_left()
    check_report(report)


def check_report(file: Path) -> None:
    said = json.loads(file.read_text())
    assert said["managed"] == {}
    assert said["rights"] == [["CapEff:", "0" * 16], ["NoNewPrivs:", "1"]]
    assert 0 not in said["uid"] + said["groups"]
    assert said["files"] == []  # not even the log of the service
    assert said["processes"] < 6  # its own


def test_a_worker_dies_with_a_service_that_is_killed(python: str, public: Path) -> None:
    code = (
        "from mrl.rewards.worker_calls import *\nfrom mrl.system.worker_user import worker_user\n"
        f"worker = reward_worker('{public}/hostile.py:hangs', 600.0, worker_user('{USER}'))\n"
        "call_worker(worker, {'prompts': ['p'], 'completions': ['c'], 'columns': {}}, 600.0)\n"
    )
    with subprocess.Popen([python, "-c", code]) as service:
        wait_for(left_behind, service)
        service.kill()
    wait_until_none_is_left()


def test_a_file_that_the_user_may_not_read_is_named(python: str, public: Path) -> None:
    closed = public / "closed"
    closed.mkdir(mode=0o700)
    shutil.copy(public / "hostile.py", closed / "mine.py")
    shutil.copy(public / "hostile.py", public / "mine.py")
    (public / "mine.py").chmod(0o600)
    for file, fault in ((closed / "mine.py", closed), (public / "mine.py", public / "mine.py")):
        worker = reward_worker(f"{file}:reward", 30.0, worker_user(USER))
        with pytest.raises(InputError) as error:
            worker.start()
        assert f"user {USER} may not read {file}" in str(error.value)
        assert f"{fault})" in str(error.value)


def test_environments_run_as_the_user(python: str, public: Path) -> None:
    (public / "who.py").write_text(ENVIRONMENT)
    config = EnvironmentConfig(name=f"{public}/who.py:Who")
    with EnvironmentRunner(config, None, worker_user(USER)) as runner:
        start = Start(Prompt("0", torch.tensor([1]), "p", {}, "rows:1"), 0)
        episodes = Playing(runner)
        episodes.begin({0: start})
        result = episodes.step({0: "a"})[0]
    assert not isinstance(result, EpisodeFailed)
    assert result.reward == UID


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2], ids=["colocated", "disaggregated"])
def test_a_hostile_reward_of_a_service(python: str, public: Path, ranks: int) -> None:
    model = public / "model"
    write_toy_model(model, seed=0)
    service = Service(public / "service", model, ranks)
    (public / "closed").mkdir(mode=0o700)
    shutil.copy(public / "hostile.py", public / "closed/mine.py")
    bob, report = public / "bob", public / "out/report.json"
    where = {"where": f"{service.folder}|{bob}|{report}"}
    rows = [{"prompt": f"row {n}", **where} for n in range(8)]
    (public / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout: dict[str, Any] = {"context_len": 64, "max_total_tokens": 2048}
    if ranks > 1:
        rollout |= {"placement": "disaggregated", "num_ranks": 1}
    service.write(tenants={"reward_user": USER}, rollout=rollout)
    service.add("bob", num_steps=2, output_dir=str(bob))
    own: dict[str, Any] = {"data": {"path": str(public / "rows.jsonl")}, "num_steps": 3}
    service.add("eve", reward=f"{public}/hostile.py:reward", **own)
    service.add("una", reward=f"{public}/closed/mine.py:reward", **own)
    service.run()
    states = service.states()
    print(json.dumps(states, indent=1), report.read_text())
    assert states["bob"] == states["eve"] == ("done", "")
    assert states["una"][0] == "paused"
    assert f"user {USER} may not read {public}/closed/mine.py" in states["una"][1]
    check_report(report)
    assert [file.name for file in report.parent.glob("imported_by_*")] == [f"imported_by_{UID}"]
    assert not left_behind()
    assert bob.stat().st_mode & 0o077 == 0
    assert service.folder.stat().st_mode & 0o077 == 0
