"""Keeps the run folders of tenants separate from each other and from the service's own files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mrl.errors import InputError
from mrl.service.record import Tenant

RUNS = "runs"
"""The only folder inside the service folder in which tenants may have their output_dirs."""


def run_folder(root: Path, given: str) -> Path:
    """Return the output_dir `given` with symbolic links resolved. Raises InputError if `given` is
    not absolute, or if it overlaps the service folder `root` without being inside `root/runs`."""
    if not os.path.isabs(given):
        raise InputError(f"output_dir is {given!r}; expected an absolute path")
    real, runs = Path(os.path.realpath(given)), root / RUNS
    if _overlap(real, root) and (real == runs or runs not in real.parents):
        raise InputError(
            f"output_dir {given} and the service folder {root} overlap; choose one inside {runs}, or "
            "outside the service folder"
        )
    return real


def check_place(
    name: str, output: Path, present: Sequence[Tenant], known: Iterable[Tenant], limit: int
) -> None:
    """Raise InputError if a new tenant may not have this name and run folder, or if the service is
    full. The name must not belong to a present tenant. The folder must not overlap the folder of a
    present tenant, or of a removed tenant with the same name.

    `output`: the run folder. `present`: tenants that were not removed. `known`: both the present
    and the removed tenants. `limit`: the maximum number of active tenants.
    """
    if (own := next((tenant for tenant in present if tenant.name == name), None)) is not None:
        attach = f", or attach to it: client.session({name!r})" if own.loop == "client" else ""
        raise InputError(f"there is a tenant {name} already; give another name{attach}")
    for other in present:
        if _overlap(output, Path(other.output_dir)):
            raise InputError(
                f"output_dir {output} and that of tenant {other.name}, {other.output_dir}, are one "
                "folder or lie in each other; choose another"
            )
    for past in known:
        if past.name == name and _overlap(output, Path(past.output_dir)):
            raise InputError(
                f"output_dir {output} holds the run of the tenant {name} that was removed: its "
                f"adapters {name}@1, {name}@2 ... would be other ones from now on; choose another "
                "output_dir, or another name to continue that run"
            )
    if sum(tenant.is_active for tenant in present) >= limit:
        raise InputError(
            f"the service has tenants.max_number={limit} tenants; remove one, or wait until one is done"
        )


def _overlap(one: Path, other: Path) -> bool:
    """Whether two folders are the same, or one contains the other."""
    return one == other or one in other.parents or other in one.parents
