"""`mrl tenants add | list | pause | resume | remove | status | key` manages a service's tenants."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mrl.commands.recipe_arguments import add_recipe
from mrl.commands.tenant_keys import add_keys
from mrl.errors import InputError

VARIABLE = "MRL_SERVICE"
POLL_S = 1.0
"""Seconds between two queries of `status --watch`."""
WAIT_S = 0.2
"""Seconds between two looks for the folder of a service that has not started yet."""
NUM_ROUNDS = 20
"""`list` shows each tenant's share of the trainer's time, and each tenant's waiting times. Both are
computed from this many of the newest rounds (rows of the service's metrics.jsonl)."""


def add_to(commands: Any) -> None:
    tenants = commands.add_parser(
        "tenants",
        help="add tenants to a service, pause, remove and watch them",
        description="Change and show the tenants of a service, which has one base model and trains a "
        "LoRA adapter for each of them (docs/tenants.md).",
    )
    actions = tenants.add_subparsers(required=True, metavar="ACTION")

    action = partial(_add_action, actions)

    def one(name: str, run: Callable[[argparse.Namespace], None], text: str) -> Any:
        command = action(name, run, text)
        command.add_argument("name", metavar="NAME", help="a tenant, see mrl tenants list")
        return command

    add = action(
        "add", run_add, "queue a recipe with a lora branch, which may omit the service's keys"
    )
    add_recipe(add)
    add.add_argument("--name", metavar="NAME", help="its name; by default that of the file")
    add.add_argument(
        "--weight", type=float, default=1.0, metavar="W", help="share of the training (default 1)"
    )
    add.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="wait S seconds for the service to start",
    )
    action("list", run_list, "list the tenants, also of a service that does not run")
    pause = one("pause", run_pause, "pause a tenant after its current step")
    pause.add_argument("--reason", metavar="TEXT", help="the reason that `list` shows")
    one("resume", run_resume, "put a paused tenant back into the queue")
    one("remove", run_remove, "remove a tenant after its current step; its run folder stays")
    status = one("status", run_status, "show a tenant and its newest metrics")
    status.add_argument("--watch", action="store_true", help="print each step until it stops")
    add_keys(actions, _add_action)


def _add_action(
    actions: Any, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> Any:
    """Add an action that takes the folder of a service, and return its parser."""
    command = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument(
        "--service",
        type=Path,
        default=os.environ.get(VARIABLE),
        metavar="FOLDER",
        help=f"the output_dir of the service; by default the variable {VARIABLE}",
    )
    command.set_defaults(run=run)
    return command


def run_add(args: argparse.Namespace) -> None:
    from mrl.run.source import is_run, read_source
    from mrl.service.record import check_name

    path: Path = args.recipe
    # The config.yaml of a run has all keys, also those that its own service had set.
    is_record = path.is_dir() or (path.name == "config.yaml" and is_run(path.parent))
    if is_record:
        tree = read_source(path, args.overrides).model_dump(mode="json")
    else:
        tree = _read(path, args.overrides)
    if isinstance(tree.get("output_dir"), str):
        tree["output_dir"] = os.path.abspath(tree["output_dir"])
    name = args.name if args.name is not None else _name_of(path)
    added = _client(args, args.wait).add(check_name(name), tree, args.weight, is_record=is_record)
    print(f"{name} is {added['state']}; its run folder is {_shown(added['output_dir'])}")
    print(f"next: mrl tenants status {name} --watch{_service_option(args)}")


def run_list(args: argparse.Namespace) -> None:
    from mrl.run import console
    from mrl.service.metrics import over_rounds
    from mrl.service.record import newest_rows

    tenants, note = _from_service_or_disk(args)
    rounds = islice(newest_rows(args.service), NUM_ROUNDS)
    shares = over_rounds(rounds, {each["name"]: each["sequence"] for each in tenants})
    rows = [
        (
            each["name"],
            each["state"],
            _steps(each, "/"),
            f"{each['weight']:g}",
            _number(each["metrics"].get("reward/mean")),
            _share(shares[each["name"]].trainer_share),
            _seconds(shares[each["name"]].gate_wait_s, shares[each["name"]].queue_age_s),
            each["reason"] or each["output_dir"],
        )
        for each in tenants
    ]
    if rows:
        head = ("name", "state", "steps", "weight", "reward", "trainer", "waits", "run or reason")
        console.table(f"{len(rows)} tenant(s)", head, rows)
    else:
        print(f"there are no tenants; add one: mrl tenants add RECIPE{_service_option(args)}")
    if note:
        print(note)


def run_pause(args: argparse.Namespace) -> None:
    paused = _client(args).pause(args.name, args.reason)
    resume = f"mrl tenants resume {args.name}{_service_option(args)}"
    print(f"{args.name} is paused ({_shown(paused['reason'])}); {resume}")


def run_resume(args: argparse.Namespace) -> None:
    print(f"{args.name} is {_client(args).resume(args.name)['state']}")


def run_remove(args: argparse.Namespace) -> None:
    removed = _client(args).remove(args.name)
    print(f"{args.name} is removed; its run stays in {_shown(removed['output_dir'])}")


def run_status(args: argparse.Namespace) -> None:
    from mrl.run import console

    tenants, note = _from_service_or_disk(args, args.name)
    (tenant,) = tenants
    rows = [
        (name, str(tenant[name]))
        for name in ("name", "state", "reason", "sequence", "weight", "output_dir")
        if tenant[name] != ""
    ]
    rows.append(("steps", _steps(tenant, " of ")))
    if "session" in tenant:
        rows.append(("waiting", f"{tenant['session']['queued']} operation(s)"))
    metrics = tenant["metrics"]
    of_session, of_recipe = ("loss/policy", "grad_norm"), ("reward/mean", "loss/total")
    keys = of_session if "session" in tenant else of_recipe
    rows += [(key, _number(metrics[key])) for key in keys if key in metrics]
    console.pairs(rows)
    if note:
        print(note)
    elif args.watch:
        _watch(args)


def _watch(args: argparse.Namespace) -> None:
    """Print a line for each step until the tenant is paused, done or removed."""
    from mrl.run import console
    from mrl.run.folder import RunFolder

    args.after_interrupt = f"{args.name} continues"
    client, shown = _client(args), -1
    while True:
        tenant = client.tenant(args.name)
        for row in RunFolder(tenant["output_dir"]).read_metrics():
            if row["step"] > shown:
                is_first, shown = shown < 0, row["step"]
                console.step_line(row, num_steps=tenant["num_steps"] or None, is_first=is_first)
        if tenant["state"] not in ("queued", "running"):
            why = f": {_shown(tenant['reason'])}" if tenant["reason"] else ""
            print(f"{args.name} is {tenant['state']}{why}")
            return
        time.sleep(POLL_S)


def _from_service_or_disk(
    args: argparse.Namespace, name: str | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Return the tenants of the service, or only the tenant `name`, and a note for the terminal.

    The note is empty if the service answers. Otherwise the tenants are read from the service's
    folder, and the note says so. Raises InputError if the service has no tenant `name`.
    """
    from mrl.service.client import NobodyListens
    from mrl.service.record import check_name, describe, read_tenants
    from mrl.service.start import is_alive

    client = _client(args)
    try:
        return [client.tenant(name)] if name else client.tenants(), ""
    except NobodyListens as error:
        note = f"{error}; the tenants shown are those on disk"
    state = "starting" if is_alive(args.service) else "stopped"
    found = [each for each in read_tenants(args.service) if name or each.state != "removed"]
    if name is not None:
        found = [each for each in found if each.name == check_name(name)]
        if not found:
            raise InputError(f"{args.service} has no tenant {name!r}; see mrl tenants list")
    shown = [describe(each) for each in found]
    for each in shown:
        if each["state"] in ("queued", "running"):  # only true while a service runs
            each["state"] = state
    return shown, note


def _client(args: argparse.Namespace, wait_s: float = 0.0) -> Any:
    """Return a client of the service. Waits at most `wait_s` seconds for the service to begin to
    start; a service that is starting is waited for as long as its process is alive."""
    from mrl.service.client import ControlClient

    if args.service is None:
        raise InputError(
            f"which service? give --service FOLDER, its output_dir, or set the variable {VARIABLE}"
        )
    args.service = Path(args.service)
    if not 0 <= wait_s < math.inf:
        raise InputError(f"--wait {wait_s:g}: expected a finite number of seconds, 0 or more")
    deadline = time.monotonic() + wait_s
    while not (args.service / "service.yaml").is_file() and time.monotonic() < deadline:
        time.sleep(WAIT_S)
    if not (args.service / "service.yaml").is_file():
        raise InputError(
            f"--service {args.service} is not the folder of a service: it has no service.yaml; give "
            "the output_dir of one, or start it first: mrl serve SERVICE.yaml"
        )
    client = ControlClient(args.service)
    if wait_s:
        client.wait_until_listening(max(0.0, deadline - time.monotonic()))
    return client


def _service_option(args: argparse.Namespace) -> str:
    """Return the option --service that a further command needs; empty where the variable names the
    service."""
    if str(args.service) == os.environ.get(VARIABLE):
        return ""
    return f" --service {shlex.quote(str(args.service))}"


def _read(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Return a recipe file as a dict of JSON values, with the overrides applied.

    Raises InputError if a value has no JSON form.
    """
    from mrl.config.load import read_tree

    try:
        return json.loads(json.dumps(read_tree(path, overrides)))
    except TypeError as error:  # such as a date
        raise InputError(f"recipe {path} has a value that no key accepts: {error}") from None


def _name_of(path: Path) -> str:
    """Return a valid name for a tenant, made from the name of a recipe's file or folder."""
    place = path.absolute()
    stem = place.parent.name if place.name == "config.yaml" else place.stem
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-_")[:63]


def _steps(tenant: dict[str, Any], of: str) -> str:
    """Return a text with the steps that a tenant has done and the total, separated by `of`.

    If a client trains the tenant step by step, there is no total, and the text is `N by a client`.
    """
    if tenant["loop"] == "client":
        return f"{tenant['steps_done']} by a client"
    return f"{tenant['steps_done']}{of}{tenant['num_steps'] or '?'}"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(*values: float | None) -> str:
    """Format the sum of the values that are not None, in seconds; `-` if all are None."""
    present = [value for value in values if value is not None]
    return f"{sum(present):.1f}s" if present else "-"


def _shown(text: str) -> str:
    from mrl.system.printable import escape

    return escape(text)
