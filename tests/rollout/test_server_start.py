"""A start that fails ends soon, says why, and leaves no process."""

from __future__ import annotations

import os
import signal
import time

import pytest
from rollout_helpers import make_engine

from mrl.errors import RunFailed
from mrl.toy_model import write_toy_model


def test_failed_start_shows_the_log(tmp_path):
    write_toy_model(tmp_path / "toy")
    config = tmp_path / "toy" / "config.json"
    config.write_text(config.read_text().replace("Qwen3MoeForCausalLM", "NoSuchModel"))
    engine = make_engine(tmp_path / "toy", tmp_path / "logs" / "engine.log")
    with pytest.raises(
        RunFailed, match=r"^.*exit code .*NoSuchModel.*; its log is .*engine\.log\nlast"
    ):
        engine.start()
    assert engine.state == "stopped"
    assert not engine.connection.process.tree()


def test_start_has_a_time_limit(toy_folder, tmp_path, monkeypatch):
    """The server is stopped, because on a busy machine it can be ready before the limit is checked."""
    engine = make_engine(toy_folder, tmp_path / "engine.log", start_timeout_s=0.2)
    process = engine.connection.process
    start = process.start

    def start_stopped():
        start()
        os.kill(process.pid, signal.SIGSTOP)

    monkeypatch.setattr(process, "start", start_stopped)
    with pytest.raises(RuntimeError, match=r"not ready after rollout\.start_timeout_s=0\.2 s"):
        engine.start()
    assert not process.tree()


@pytest.mark.release
def test_a_start_ends_when_the_detokenizer_dies(toy_folder, tmp_path):
    """SGLang waited 70 seconds for it, and mrl for SGLang."""
    engine = make_engine(toy_folder, tmp_path / "engine.log", start_timeout_s=120.0)
    killed = []

    def kill_detokenizer():
        for process in engine.connection.process.tree():
            if process.name().startswith("sglang::detok") and not killed:
                process.kill()
                killed.append(time.monotonic())

    with pytest.raises(RuntimeError, match="died"):
        engine.start(meanwhile=kill_detokenizer)
    assert time.monotonic() - killed[0] < 60  # SGLang's own limit is 70 s
    assert not engine.connection.process.tree()
