"""Agents' processes that misbehave: none outlives its episode, and none of them gets a reward."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mrl.config import EnvironmentConfig
from mrl.environments import command
from mrl.environments.command import AgentCommand, printed_reward, resolved
from mrl.errors import InputError
from mrl.system.proc import is_running
from tests.waiting import wait_until


def run(code: str, limit_s: float = 60.0, given=None, **variables: str):
    config = EnvironmentConfig(command=("python", "-c", code), episode_limit_s=limit_s)
    with AgentCommand(config) as agents:
        return agents.run(given or {}, variables)


def test_it_reads_its_row_and_prints_its_reward():
    code = "import json, os, sys; print(json.load(sys.stdin)['x'] / int(os.environ['BY']))"
    assert run(code, given={"x": 3}, BY="4").reward == 0.75
    assert run("print(1)", given={"x": "y" * (4 << 20)}).reward == 1  # which nobody reads


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("0.5", 0.5), ("noise\n-3\n\n", -3.0), ('{"reward": 2, "why": "x"}', 2.0), ("1e-3", 0.001),
        ("", None), ("done", None), ("0.5 points", None), ("NaN", None), ("Infinity", None),
        ("1e39", None), ("true", None), ('{"score": 1}', None), ("[1]", None), ('"1"', None),
        ("9" * 400, None), ("[" * 5000, None),
        ('{"reward": 1, "why": "a\u2028b\x85c"}\n', 1.0), (" 9%\r100%\r0.5\r\n", 0.5), ("1\x0c2", None),
    ],
)  # fmt: skip
def test_the_last_line_is_the_reward(output, reward):
    if reward is not None:
        assert printed_reward(output) == reward
        return
    with pytest.raises((ValueError, OverflowError)):
        printed_reward(output)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "it exited with code 1: ZeroDivisionError: division by zero"),
        ("import os; print(1, flush=True); os._exit(7)", "it exited with code 7 and wrote nothing"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by signal 9"),
        ("print('nan')", "the last line of its output is 'nan', expected a reward"),
        ("pass", "the last line of its output is ''"),
    ],
)
def test_one_that_dies_or_lies_has_no_reward(code, error):
    outcome = run(code)
    assert outcome.reward is None
    assert error in outcome.error


def test_one_that_hangs_is_killed_with_its_children(tmp_path):
    """Also those that have left its process group."""
    code = (
        "import os, time\n"
        "pid = os.fork()\n"
        "if not pid: os.setsid()\n"
        f"open(f'{tmp_path}/{{os.getpid()}}', 'w')\n"
        "time.sleep(600)"
    )
    outcome = run(code, 2.0)
    assert "no end within environment.episode_limit_s=2 s, killed" in outcome.error
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_one_that_floods_is_killed_and_not_kept(monkeypatch):
    monkeypatch.setattr(command, "MAX_OUTPUT_BYTES", 1 << 20)
    for file in ("stdout", "stderr"):
        code = f"import sys\nwhile True: print('x' * 10000, file=sys.{file})"
        assert "it printed more than 1 MiB" in run(code).error
    monkeypatch.setattr(command, "MAX_OUTPUT_BYTES", 64 << 20)
    assert run("print('x\\n' * (1 << 20))\nprint(0.5)").reward == 0.5


def test_what_it_leaves_running_ends_with_the_step(tmp_path):
    code = (
        "import os, time\n"
        f"if not os.fork(): os.setsid(); open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(600)\n"
        f"while not os.listdir('{tmp_path}'): time.sleep(0.01)\n"
        "print(1)"
    )
    config = EnvironmentConfig(command=("python", "-c", code))
    with AgentCommand(config) as agents:
        assert agents.run({}, {}).reward == 1  # nobody waits for its pipes
        wait_until(lambda: list(tmp_path.iterdir()))
        agents.sweep()
        (file,) = tmp_path.iterdir()
        assert not is_running(int(file.name))


def test_a_stop_ends_it_at_once():
    config = EnvironmentConfig(command=("python", "-c", "import time; time.sleep(600)"))
    with AgentCommand(config) as agents:
        stop = threading.Event()
        threading.Timer(0.3, stop.set).start()
        assert agents.run({}, {}, stop=stop).error == "the rollout is over"
        now = iter([0.0, 0.0, 1000.0, 2000.0])
        assert "no end within" in agents.run({}, {}, now=lambda: next(now)).error


def test_one_that_cannot_be_watched_does_not_stay(monkeypatch, tmp_path):
    """Also if it has been started already when the system has no more file descriptors."""
    started = []

    def fail(pid):
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    assert run("import time; time.sleep(600)").error == "it cannot be watched: Too many open files"
    assert not is_running(started[0])
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run("pass")
    assert len(os.listdir("/proc/self/fd")) == num_open
    with pytest.raises(TypeError):
        run("pass", given={"x": object()})
    assert len(started) == 4


def test_agents_end_when_the_run_is_killed(tmp_path):
    code = (
        f"import os, time; open(f'{tmp_path}/agent', 'w').write(str(os.getpid())); time.sleep(600)"
    )
    parent = (
        "from mrl.config import EnvironmentConfig\n"
        "from mrl.environments.command import AgentCommand\n"
        f"AgentCommand(EnvironmentConfig(command=('python', '-c', {code!r}))).run({{}}, {{}})"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=Path(__file__).parents[2])
    agent = tmp_path / "agent"
    wait_until(lambda: agent.exists() and agent.read_text())
    pid = int(agent.read_text())
    assert is_running(pid)
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(pid), "the end of the agent")


def test_a_program_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"expected a list of words: \[python, agent.py\]"):
        resolved(["python agent.py"])
    with pytest.raises(InputError, match="there is no program 'no-such-agent' in PATH"):
        AgentCommand(EnvironmentConfig(command=("no-such-agent",)))
    script = tmp_path / "agent.sh"
    script.write_text("no interpreter")
    script.chmod(0o755)
    with AgentCommand(EnvironmentConfig(command=(str(script),))) as agents:
        assert "it cannot be started: Exec format error" in agents.run({}, {}).error


def test_a_time_that_stands_still_does_not_count():
    from mrl.collect.endpoint.rollout import PausableTime

    clock = PausableTime()
    before = clock.now()
    clock.pause()
    clock.pause()
    time.sleep(0.1)
    clock.resume()
    clock.resume()
    assert clock.now() - before < 0.1
    assert os.getpid()
