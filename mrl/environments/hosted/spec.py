"""What a worker of `environment.verifiers` or `environment.mcp` is started with, and what it can be
asked before a run: the tasks of an environment, and the tools of servers."""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.config import EnvironmentConfig
from mrl.environments.command import EPISODE, KEPT_BYTES, resolved
from mrl.errors import InputError
from mrl.system.process_search import kill_by_variable

PROGRAMS = Path(__file__).parent / "programs"
ANSWER_S = 600.0
"""Seconds for loading the tasks of an environment, which may download them, or for listing tools."""


def worker_command(config: EnvironmentConfig, question: str = "") -> list[str]:
    """Return the command that starts a worker or, with `question`, a process that answers it.

    Raises InputError if there is no such Python.
    """
    name = "verifiers" if config.verifiers is not None else "mcp"
    program = str(PROGRAMS / f"{name}_program.py")
    return [_python(config), program, *([question] if question else [])]


def _python(config: EnvironmentConfig) -> str:
    if config.python is None:
        return sys.executable
    found = shutil.which(config.python)
    if found is None:
        raise InputError(
            f"environment.python: there is no program {config.python!r} in PATH or at this path from "
            f"{os.getcwd()}; give the Python of an environment that has "
            f"{'verifiers' if config.verifiers else 'mcp'}"
        )
    return found


def worker_spec(config: EnvironmentConfig) -> dict[str, Any]:
    """Return the first line that a worker reads."""
    if config.verifiers is not None:
        return {"name": config.verifiers, "arguments": config.arguments}
    assert config.mcp is not None
    spec = config.mcp.model_dump(mode="json")
    command = list(config.mcp.command)
    if command and command[0] == "python":
        command = [_python(config), *resolved(command, "environment.mcp.command")[1:]]
    elif command:
        command = resolved(command, "environment.mcp.command")
    return {**spec, "command": command, "call_limit_s": config.time_limit_s}


def tasks_of(config: EnvironmentConfig, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks of a verifiers environment as rows with the columns `prompt` and `task`.

    `arguments` are merged over those of the environment. Raises InputError if they cannot be loaded.
    """
    merged = _merged(config.arguments, arguments)
    whole = config.model_copy(update={"arguments": merged})
    return [json.loads(row) for row in _task_lines(json.dumps(whole.model_dump(mode="json")))]


@functools.lru_cache(maxsize=8)
def _task_lines(config: str) -> tuple[str, ...]:
    """Return the rows as JSON. They are kept, because a process may check its recipe several times."""
    found = _asked(EnvironmentConfig.model_validate_json(config), "tasks")
    return tuple(json.dumps(message["row"]) for message in found)


def listed_tools(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Return the tools of the MCP servers in OpenAI's form. Raises InputError if a server cannot be
    started or reached, or has no tools."""
    return [message["tool"] for message in _asked(config, "tools")]


def _asked(config: EnvironmentConfig, question: str) -> list[dict[str, Any]]:
    """Return the lines with which a worker program answers a question. Raises InputError."""
    what, token = f"environment {config.label}", secrets.token_hex(8)
    # A server that stays behind may hold stderr open, so nobody waits for the end of that pipe.
    said, (ours, its) = bytearray(), os.pipe()
    reader = threading.Thread(target=_keep_end, args=(ours, said), daemon=True)
    reader.start()
    try:
        done = subprocess.run(
            worker_command(config, question),
            input=json.dumps(worker_spec(config)).encode() + b"\n",
            stdout=subprocess.PIPE,
            stderr=its,
            env={**os.environ, EPISODE: token},
            timeout=ANSWER_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{what}: its {question} took more than {ANSWER_S:g} s") from None
    except OSError as error:
        raise InputError(f"{what}: cannot be started: {error.strerror}") from None
    finally:
        os.close(its)
        kill_by_variable(EPISODE, token)
        reader.join(1.0)
    # A process that is killed may have written the beginning of a line.
    lines = [json.loads(line) for line in done.stdout.split(b"\n")[:-1]]
    if lines and "input_error" in lines[-1]:
        raise InputError(f"{what}: {lines[-1]['input_error']}")
    if not lines or "end" not in lines[-1]:
        text = said.decode(errors="replace").strip().splitlines()
        last = f": {' '.join(text[-1].split())[:500]}" if text else ""
        raise InputError(f"{what}: the process ended with code {done.returncode}{last}")
    return lines[:-1]


def _keep_end(descriptor: int, into: bytearray) -> None:
    """Read a pipe to its end, and keep the last bytes of what it says."""
    with open(descriptor, "rb", buffering=0) as pipe:
        while chunk := pipe.read(1 << 16):
            into += chunk
            del into[:-KEPT_BYTES]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`, objects key by key."""
    both = {key: value for key, value in over.items() if isinstance(value, dict)}
    inner = {key: _merged(base[key], both[key]) for key in both if isinstance(base.get(key), dict)}
    return {**base, **over, **inner}
