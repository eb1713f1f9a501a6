"""The history of a run, RUN/history.jsonl: one line per start, and one if `mrl branch` made the run.

A line holds the time (UTC), the event (`start` or `branch`), the number of steps done, the command,
every changed key with its old and its new value, the keys that were allowed to change, mrl's version
and git commit, and the digests of the files that the recipe names. If keys changed, RUN/configs/ keeps
the previous recipe.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mrl.config import Recipe
from mrl.errors import InputError
from mrl.run.changes import Change, find_changes, flatten, is_in, rule_of
from mrl.run.contents import contents_of
from mrl.run.source import load_run
from mrl.system.files import write_whole
from mrl.system.json_text import check_kinds, parse_row
from mrl.version import __version__


@dataclass(frozen=True)
class Update:
    """The changes that a start makes to the recipe of a run."""

    changes: tuple[Change, ...] = ()
    allowed: tuple[str, ...] = ()
    """The names given with `--allow`, whether they were needed or not."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that the recipe names, by key; empty on ranks other than 0."""


def changes_to(
    root: Path, recipe: Recipe, contents: Mapping[str, str], step: int | None = None
) -> list[Change]:
    """Return the changes from the recipe of the run folder `root` to `recipe`.

    With `step`, the old recipe is the one that the run had when `step` steps were done. `contents`
    holds the digests of the files that `recipe` names; if it is empty, the contents of files are
    not compared. Old digests that the history does not have are computed from the files that the
    old recipe names, if these files still exist.
    """
    history = History(root)
    there = load_run(root, config=None if step is None else history.config_at(step))
    old, new = flatten(there.model_dump()), flatten(recipe.model_dump())
    old["output_dir"] = new["output_dir"]  # moving the folder does not count as a change
    known = history.contents(step) if contents else {}
    if unknown := [key for key in contents if key not in known and old.get(key) != new[key]]:
        now = contents_of(there)
        known |= {key: now[key] for key in unknown if key in now}
    if not contents:  # only rank 0 compares contents
        new |= {key: old[key] for key in new if key in old and rule_of(key).by_contents}
    return find_changes(old, new, known, contents)


def allows_rows(allowed: Sequence[str]) -> bool:
    """Return whether `--allow` with the names `allowed` permits other rows of data, even if the digests
    of the files show no change: of large files they cover only a part, and data sets of the hub and
    tasks of an environment have none."""
    return any(name in ("data", "data.path", "data.sources") for name in allowed)


_KINDS = {"step": "whole", "changes": "object", "moved": "list", "allowed": "list",
          "contents": "object", "config_before": "text"}  # fmt: skip
"""The types of the values in a line (`mrl.system.json_text.check_kinds`)."""


class History:
    """The history of a run folder. Only rank 0 writes it."""

    def __init__(self, root: Path) -> None:
        self.file = root / "history.jsonl"
        self.configs = root / "configs"
        self._config = root / "config.yaml"

    def read(self) -> list[dict[str, Any]]:
        """Return the entries of the file, one per line, leaving out a last line that a crash cut short.

        The list is empty if the file does not exist, as in the run of an earlier version of mrl.
        Raises InputError if a line is damaged.
        """
        with suppress(FileNotFoundError):
            lines = self.file.read_bytes().split(b"\n")[:-1]
            return [self._entry(line, number) for number, line in enumerate(lines, 1)]
        return []

    def _entry(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = {"changes": {}, "moved": [], "allowed": [], "contents": {}, **parse_row(line)}
            check_kinds(entry, _KINDS, required=("step",))
            if any(not isinstance(c, list) or len(c) != 2 for c in entry["changes"].values()):
                raise ValueError("`changes` are not pairs")
            return entry
        except ValueError as error:
            raise InputError(
                f"{self.file}:{number}: the line is damaged ({error}); restore the file, or delete "
                "the line: the run then no longer knows what that start changed"
            ) from None

    def contents(self, step: int | None = None) -> dict[str, str]:
        """Return the newest recorded digests of the files that the run's recipe names, by key.

        If `step` is given, entries that were recorded with more than `step` steps done are ignored.
        """
        entries = self.read()
        while step is not None and entries and entries[-1]["step"] > step:
            entries.pop()
        found: dict[str, str] = {}
        for entry in entries:
            found |= entry["contents"]
        return found

    def add(
        self,
        event: str,
        step: int,
        changes: Sequence[Change],
        contents: Mapping[str, str],
        *,
        allowed: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """Add a line to the history, with the fields in `more`.

        If there are changes, the current config.yaml is first copied to RUN/configs/.
        """
        known = self.contents()
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "event": event,
            "step": step,
            "command": _command(),
            "changes": {change.key: [change.old, change.new] for change in changes},
            "moved": [change.key for change in changes if change.is_moved],
            "allowed": list(allowed),
            "mrl": __version__,
            "commit": _commit(),
            "contents": {k: digest for k, digest in contents.items() if known.get(k) != digest},
            **more,
        }
        if changes and self._config.exists():
            entry["config_before"] = self._keep_config()
        lines = [json.dumps(each) + "\n" for each in (*self.read(), entry)]
        # The file is rewritten, so that the new line is not appended to one that a crash cut short.
        write_whole(self.file, "".join(lines), durable=True)

    def _keep_config(self) -> str:
        self.configs.mkdir(exist_ok=True)
        name = f"config_{len(list(self.configs.glob('config_*.yaml'))):04d}.yaml"
        write_whole(self.configs / name, self._config.read_bytes())
        return f"{self.configs.name}/{name}"

    def config_at(self, step: int) -> Path:
        """Return the path of the recipe with which step `step` was trained."""
        config = self._config
        for entry in reversed(self.read()):
            if entry["step"] <= step:
                break
            if "config_before" in entry:
                config = self._config.parent / entry["config_before"]
        return config

    def may_have_other_rows(self, step: int) -> bool:
        """Return whether the data has changed since `step`, or was allowed to change: whether the
        position in the checkpoint of `step` may be given up if the rows are not those of the position.
        """
        allowed = any(allows_rows(e["allowed"]) for e in self.read() if e["step"] >= step)
        return allowed or self.has_other_data(step)

    def has_other_data(self, step: int) -> bool:
        """Return whether the data that the run reads has changed since `step`, by its keys or digests.

        If so, the data position in the checkpoint of `step` no longer applies. Data that was changed
        and then changed back counts as unchanged.
        """
        before: dict[str, tuple[Any, str | None]] = {}
        now: dict[str, Any] = {}
        known: dict[str, str] = {}
        for entry in self.read():
            for key, (old, new) in entry["changes"].items():
                now[key] = new
                if entry["step"] >= step and is_in(key, "data") and key not in entry["moved"]:
                    before.setdefault(key, (old, known.get(key)))
            known |= entry["contents"]
        return any(
            digest != known.get(key) if digest and key in known else value != now[key]
            for key, (value, digest) in before.items()
        )


def _command() -> str:
    """Return the command line: a command of mrl, or the user's script with its arguments."""
    program = Path(sys.argv[0])
    name = "mrl" if program.name in ("mrl", "__main__.py") else str(program)
    return shlex.join([name, *sys.argv[1:]])


def _commit() -> str | None:
    """Return the git commit of mrl's source, with `+` if tracked files have changed.

    The result is None outside of git.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit, changed = (
            _git(root, "rev-parse", "HEAD"),
            _git(root, "status", "--porcelain", "-uno"),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + "+" * bool(changed)


def _git(root: Path, *command: str) -> str:
    words = ["git", "-C", str(root), *command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=10)
    return done.stdout.strip()
