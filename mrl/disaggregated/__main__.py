"""`python -m mrl.disaggregated` is the process of a worker.

Its settings come as one JSON object on stdin, as the run's token may be in no command line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

from mrl.config.load import recipe_of
from mrl.disaggregated.engine_place import OwnEngine
from mrl.disaggregated.free_worker import FreeWorker
from mrl.disaggregated.wire import WireClosed
from mrl.disaggregated.worker import Worker
from mrl.errors import ExitCode, InputError, RunFailed
from mrl.preflight import check
from mrl.system.heartbeat import close_page, open_page
from mrl.system.processes import die_with_parent


def main() -> None:
    """Work for the trainer; exit with 0 when the run is over."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the trainer saves, and ends this run
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.buffer.read())
    die_with_parent(int(settings["parent"]))
    open_page()
    code = _work(settings)
    close_page()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may still wait for the trainer


def _work(settings: dict[str, Any]) -> int:
    """Work until the run is over; return the exit code."""
    try:
        recipe = recipe_of(settings["recipe"], [], "recipe")
        plan = check(recipe, int(settings["world"]), allowed=settings["allowed"])
        kind = FreeWorker if recipe.asynchronous.is_free else Worker
        kind(plan, OwnEngine(plan, int(settings["engine"])), settings).run()
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


if __name__ == "__main__":
    main()
