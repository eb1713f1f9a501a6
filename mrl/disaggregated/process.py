"""Runs a worker as the process that a supervisor starts.

Its settings come as one JSON object on stdin, as the run's token may be in no command line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from mrl.disaggregated.wire import WireClosed
from mrl.errors import ExitCode, InputError, RunFailed
from mrl.system.heartbeat import close_page, open_page
from mrl.system.processes import die_with_parent


def run_worker(work: Callable[[dict[str, Any]], None]) -> None:
    """Call `work` with the settings, and end this process; with 0 when `work` returns."""
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer saves, and says when it is over
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
        return ExitCode.LOST_RANK  # the trainer's launcher says what has ended it
    except InputError as error:
        print(f"mrl: rollout engine {settings['engine']}: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except RunFailed as error:  # the trainer reports it
        return error.exit_code
    except Exception as error:
        traceback.print_exception(error)
        return ExitCode.UNFORESEEN
    return ExitCode.DONE
