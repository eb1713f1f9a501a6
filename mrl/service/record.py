"""Reads the records of tenants in a service folder, also while the service writes them.

SERVICE_DIR/service.yaml              the resolved configuration
SERVICE_DIR/control.sock              where the service listens (mrl/service/control.py)
SERVICE_DIR/token                     the secret of callers over TCP
SERVICE_DIR/start.json                the service's process and its command (mrl/service/start.py)
SERVICE_DIR/under_way.json            the tenant whose work is under way (mrl/service/crashes.py)
SERVICE_DIR/tenants/NAME/recipe.yaml  the resolved recipe
SERVICE_DIR/tenants/NAME/state.json   a `Tenant`
SERVICE_DIR/tenants/.removed/         removed tenants whose name was given to a later tenant
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from mrl.config.branch import Branch
from mrl.errors import InputError
from mrl.system.json_text import parse_json

NAME = r"[a-z0-9][a-z0-9_-]{0,62}"
"""Pattern of a tenant's name. The name is used as a folder name, in URLs, and in the engine's name
for the tenant."""
State = Literal["queued", "running", "paused", "done", "removed"]
Loop = Literal["recipe", "client"]
"""Which training loop a tenant has: "recipe" for the service's loop over a recipe, "client" for a
session, whose loop runs in a client."""
RECIPE, STATE, REMOVED = "recipe.yaml", "state.json", ".removed"
MAX_ROW_BYTES = 1 << 20
"""Number of bytes that are read from the end of a metrics file to find its newest rows."""


class Tenant(Branch):
    """The record of a tenant: everything that a service stores about the tenant, except its
    recipe."""

    name: str = Field(pattern=f"^{NAME}$")
    state: State
    reason: str = ""
    """Why the tenant is paused, in one line; empty in other states."""
    sequence: int = Field(ge=1)
    """The tenant's number among all tenants that ever joined the service, from 1."""
    weight: float = Field(gt=0)
    """The tenant's scheduling weight. The tenant's share of the trainer's time and its share of an
    engine are proportional to it."""
    output_dir: str
    """The tenant's run folder, as an absolute path without symbolic links."""
    num_steps: int
    """Number of steps of the whole run; 0 for a session."""
    loop: Loop = "recipe"
    resumed: int = Field(default=0, ge=0)
    """How many times the tenant was resumed."""
    request: str = ""
    """A digest of the request that added the tenant, if that request had a key; otherwise empty."""

    @property
    def incarnation(self) -> str:
        """An id of the tenant that changes with each resume. No other tenant of the service ever
        has the same id, even if it has the same name. `name_of` returns the name in the id."""
        return f"{self.sequence}-{self.resumed}-{self.name}"

    @property
    def is_active(self) -> bool:
        """Whether the tenant counts towards the limit tenants.max_number."""
        return self.state in ("queued", "running", "paused")


def name_of(incarnation: str) -> str:
    """Return the tenant's name, which is part of the id `incarnation` (see
    `Tenant.incarnation`)."""
    return incarnation.split("-", 2)[2]


def sequence_of(incarnation: str) -> int:
    """Return the tenant's number (`Tenant.sequence`), which is part of the id `incarnation` (see
    `Tenant.incarnation`)."""
    return int(incarnation.split("-", 1)[0])


def order_of(incarnation: str) -> tuple[int, int]:
    """Return the tenant's number and how often it was resumed. Both never fall from one incarnation of
    a name to the next."""
    sequence, resumed, _ = incarnation.split("-", 2)
    return int(sequence), int(resumed)


def engine_name(incarnation: str) -> str:
    """Return the name by which engines know a tenant: the first 63 characters of the tenant's id
    `incarnation`, because engines refuse longer names. The name is unique, because the numbers at
    its beginning are unique."""
    return incarnation[:63]


def check_name(name: Any) -> str:
    """Return `name` if a tenant may have it; otherwise raise InputError."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise InputError(
            f"the name of a tenant is {str(name)[:80]!r}; expected 1 to 63 small letters, digits, _ "
            "and -, the first of them a letter or digit"
        )
    return name


def read_tenants(service: Path) -> list[Tenant]:
    """Return the tenants of a service folder, including removed ones, in the order in which they
    joined. Removed tenants whose name was given to a later tenant are left out: see `read_past`.

    Raises InputError if a tenant's folder is a link, or its state.json is damaged.
    """
    found = [read_tenant(folder) for folder in _folders(service / "tenants", NAME)]
    return sorted(found, key=lambda tenant: tenant.sequence)


def read_past(service: Path) -> list[Tenant]:
    """Return the removed tenants whose name was given to a later tenant. Raises InputError for the
    same reasons as `read_tenants`."""
    past = service / "tenants" / REMOVED
    return [read_tenant(folder) for folder in _folders(past, rf"\d+-{NAME}")]


def read_tenant(folder: Path) -> Tenant:
    """Return the record in the state.json of a tenant's folder. Raises InputError if the file is
    damaged."""
    file = folder / STATE
    try:
        return Tenant.model_validate(parse_json(_read_plain(file), str(file)))
    except (OSError, ValueError, ValidationError) as error:
        what = " ".join(str(error).split())
        raise InputError(
            f"{file} is damaged: {what}; bring it back from a copy, or move {folder} away to give the "
            "tenant up"
        ) from None


def tenant_folder(service: Path, name: str) -> Path:
    """Return the folder of a tenant inside the service folder. Raises InputError if the name is not
    allowed."""
    return service / "tenants" / check_name(name)


def newest_row(run: Path) -> dict[str, Any] | None:
    """Return the newest complete row of a run's metrics; None if there is none. Rows with a step
    that is not an integer are skipped."""
    rows = (row for row in newest_rows(run) if isinstance(row.get("step", -1), int))
    return next(rows, None)


def newest_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield complete rows of the metrics.jsonl of a run or a service, the newest first. Only the
    last `MAX_ROW_BYTES` bytes of the file are read."""
    file = folder / "metrics.jsonl"
    try:
        if not file.is_file():  # reading a pipe would block
            return
        with file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - MAX_ROW_BYTES))
            lines = stream.read().split(b"\n")
    except OSError:
        return
    for line in reversed(lines[:-1]):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def describe(tenant: Tenant) -> dict[str, Any]:
    """Return a tenant as the control socket and the commands show it: its record, the number of its
    steps that are done, and its newest metrics."""
    row = newest_row(Path(tenant.output_dir))
    done = 0 if row is None else row.get("step", -1) + 1
    shown = tenant.model_dump(exclude={"request"})
    return {**shown, "steps_done": done, "metrics": row or {}}


def _folders(parent: Path, pattern: str) -> Iterator[Path]:
    """Yield the folders in `parent` whose names match `pattern`, sorted by name. Raises InputError
    if one of them is a link or not a folder."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if not re.fullmatch(pattern, path.name):
            continue
        if path.is_symlink() or not path.is_dir():
            raise InputError(
                f"{path} is not a folder of its own, as that of a tenant has to be; move it away"
            )
        yield path


def _read_plain(file: Path) -> bytes:
    """Return the content of a file. Raises OSError if the file is a symbolic link."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()
