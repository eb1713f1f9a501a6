"""`mrl engines list | add | remove DIR` shows and changes the engines of a run or service that goes
on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from mrl.errors import RunFailed

POLL_S = 0.5


def add_to(commands: Any) -> None:
    engines = commands.add_parser(
        "engines",
        help="list, add and remove the engines of a running job",
        description="Show, add and remove engines of a run or a service whose engines are on ranks of "
        "their own (rollout.placement=disaggregated), while it is running (docs/engines.md). Run it on "
        "the machine of rank 0.",
    )
    actions = engines.add_subparsers(required=True, metavar="ACTION")
    _add_action(actions, "list", run_list, "show the engines of a job")
    add = _add_action(actions, "add", run_add, "start further engines and wait until they serve")
    add.add_argument("--count", type=int, default=1, metavar="N", help="how many (default 1)")
    add.add_argument(
        "--host", metavar="HOST", help="the machine, which must have a rollout rank of the job"
    )
    add.add_argument("--gpus", metavar="IDS", help="GPUs that nobody uses, such as 6,7")
    remove = _add_action(
        actions, "remove", run_remove, "remove an engine once it has finished what it has"
    )
    remove.add_argument("number", type=int, metavar="NUMBER", help="see mrl engines list")
    remove.add_argument(
        "--now", action="store_true", help="let other engines do what it has not finished"
    )
    for changes in (add, remove):
        changes.add_argument(
            "--no-wait", action="store_true", help="end when the job has taken the command"
        )


def _add_action(actions: Any, name: str, run: Any, text: str) -> Any:
    command = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument(
        "folder", type=Path, metavar="DIR", help="the output_dir of the run or service"
    )
    command.set_defaults(
        run=run, after_interrupt="the job has received the command and carries it out"
    )
    return command


def run_list(args: argparse.Namespace) -> None:
    from mrl.engine_pool.elastic.client import ask_engines
    from mrl.run import console

    found = ask_engines(args.folder, "GET", "/engines")
    rows = [
        (
            str(row["number"]),
            console.escape(row["place"]) or "-",
            row["state"],
            "-" if row["version"] is None else str(row["version"]),
            str(row["groups"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["since"])),
        )
        for row in found["engines"]
    ]
    head = ("engine", "place", "state", "weights", "groups", "since")
    console.table(f"{len(rows)} engine(s)", head, rows)
    for row in found["ended"]:
        if row["why"]:
            print(f"engine {row['number']} could not be added: {console.escape(row['why'])}")


def run_add(args: argparse.Namespace) -> None:
    from mrl.engine_pool.elastic.client import ask_engines

    body: dict[str, Any] = {"count": args.count}
    if args.host is not None:
        body["host"] = args.host
    if args.gpus is not None:
        body["gpus"] = [gpu.strip() for gpu in args.gpus.split(",")]
    found = ask_engines(args.folder, "POST", "/engines", body)
    added: list[int] = found["added"]
    for row in found["engines"]:
        if row["number"] in added:
            print(f"engine {row['number']} starts on {row['place']}", flush=True)
    if not args.no_wait:
        failed = [number for number in added if not _serves(args.folder, number)]
        if failed:
            raise RunFailed(f"{len(failed)} of {len(added)} engine(s) could not be added")


def _serves(folder: Path, number: int) -> bool:
    """Wait until an engine serves, and return True, or until it is clear that it does not."""
    while True:
        found = _look_again(folder)
        for row in found["engines"]:
            if row["number"] == number and row["state"] not in ("starting", "leaving"):
                at = "" if row["version"] is None else f" with weights {row['version']}"
                print(f"engine {number} serves{at}", flush=True)
                return True
        if ended := [row for row in found["ended"] if row["number"] == number]:
            why = ended[0]["why"] or "it was removed"
            print(f"engine {number} could not be added: {why}", flush=True)
            return False
        time.sleep(POLL_S)


def run_remove(args: argparse.Namespace) -> None:
    from mrl.engine_pool.elastic.client import ask_engines

    found = ask_engines(args.folder, "DELETE", f"/engines/{args.number}", {"now": args.now})
    if args.no_wait and not _has_left(found, args.number):
        print(f"engine {args.number} leaves")
        return
    while not _has_left(found, args.number):
        time.sleep(POLL_S)
        found = _look_again(args.folder)
    print(f"engine {args.number} has left; {len(found['engines'])} engine(s) are there")


def _look_again(folder: Path) -> dict[str, Any]:
    """Return the engines of a job that has answered before. Raises RunFailed if it does not answer any
    more."""
    from mrl.engine_pool.elastic.client import NobodyAnswers, ask_engines

    try:
        return ask_engines(folder, "GET", "/engines")
    except NobodyAnswers:
        raise RunFailed(f"the job in {folder} has ended meanwhile") from None


def _has_left(found: dict[str, Any], number: int) -> bool:
    return all(row["number"] != number for row in found["engines"])
