"""Functions for a worker's process, which a supervisor has started: run the worker, and connect it
to the trainer.

The supervisor writes the worker's settings to stdin as one JSON object. It does not use the command
line, where other users could read the run's token, which is among the settings.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from mrl.engine_pool.remote.wire import Wire, WireClosed
from mrl.errors import ExitCode, InputError, RunFailed
from mrl.system.heartbeat import close_page, open_page
from mrl.system.processes import die_with_parent

CONNECT_S = 60.0
"""Seconds that the trainer may take to accept a connection."""
PULSE_S = 1.0
"""Seconds between two heartbeats of a worker."""


def run_worker(work: Callable[[dict[str, Any]], None]) -> None:
    """Call `work` with the settings from stdin, and then end this process. The exit code is 0 if
    `work` returns; otherwise it depends on the error that `work` raises."""
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer acts on signals, and sends `stop`
    settings = json.loads(sys.stdin.buffer.read())
    die_with_parent(int(settings["parent"]))
    open_page()
    code = _code_of(work, settings)
    close_page()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may still wait for the trainer


def _code_of(work: Callable[[dict[str, Any]], None], settings: dict[str, Any]) -> int:
    try:
        work(settings)
    except WireClosed:
        return ExitCode.LOST_RANK  # the trainer's launcher reports why
    except InputError as error:
        print(f"mrl: rollout engine {settings['engine']}: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except RunFailed as error:  # the trainer reports it
        return error.exit_code
    except Exception as error:
        traceback.print_exception(error)
        return ExitCode.UNFORESEEN
    return ExitCode.DONE


def connect(settings: Mapping[str, Any]) -> Wire:
    """Connect to the trainer's server at `settings["server"]`, and send the token and the engine
    number.

    Raises WireClosed if the server does not answer; the run may have ended.
    """
    address = tuple(settings["server"])
    try:
        wire = Wire(socket.create_connection(address, CONNECT_S))
    except OSError as error:
        raise WireClosed(f"the trainer at {address} does not answer: {error}") from None
    wire.send({"type": "hello", "token": settings["token"], "engine": settings["engine"]})
    return wire
