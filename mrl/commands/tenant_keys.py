"""`mrl tenants key add | list | remove` manages the keys of the Tinker API."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.errors import InputError

if TYPE_CHECKING:
    from mrl.tinker.keys import Keys


def add_keys(actions: Any, add_action: Callable[..., Any]) -> None:
    """Add the command `key` to those of `mrl tenants`. `add_action` is `tenants._add_action`."""
    keys = actions.add_parser(
        "key",
        help="keys of the Tinker API: add, list, remove",
        description="Make and remove the keys with which users call the Tinker API of a service "
        "(docs/tinker.md). The service need not run.",
    )
    below = keys.add_subparsers(required=True, metavar="ACTION")

    for name, run, text in (
        ("add", run_add, "make a key for a user and print it; it is shown only once"),
        ("remove", run_remove, "remove all keys of a user"),
    ):
        command = add_action(below, name, run, text)
        command.add_argument("name", metavar="NAME", help="the user, such as alice")
    add_action(
        below, "list", run_list, "list users, and the first letters of the digests of their keys"
    )


def run_add(args: argparse.Namespace) -> None:
    print(_keys(args).add(args.name))


def run_list(args: argparse.Namespace) -> None:
    from mrl.run import console

    rows = [
        (each["user"], each["sha256"], time.strftime("%Y-%m-%d", time.localtime(each["made"])))
        for each in _keys(args).list()
    ]
    if rows:
        console.table(f"{len(rows)} key(s)", ("user", "digest", "made"), rows)
    else:
        print("there are no keys; mrl tenants key add NAME makes one")


def run_remove(args: argparse.Namespace) -> None:
    print(f"{_keys(args).remove(args.name)} key(s) of {args.name} removed")


def _keys(args: argparse.Namespace) -> Keys:
    from mrl.tinker.keys import Keys

    if args.service is None:
        raise InputError("which service? give --service FOLDER, its output_dir")
    if not Path(args.service).is_dir():
        raise InputError(
            f"--service {args.service} is no folder; start the service once with `mrl serve`, or make "
            "the folder"
        )
    return Keys(Path(args.service))
