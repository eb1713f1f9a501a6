"""Keeps the tenants of a service on disk, so that a service that was killed finds all of them
again.

Every change takes effect through a single rename, so that after `kill -9` it is either complete or
absent. All methods may be called from any thread.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from mrl.config import Recipe, ServiceConfig, dump_recipe
from mrl.errors import InputError
from mrl.run import console
from mrl.service.agreement import resolve_tenant
from mrl.service.crashes import REASON, Crashes
from mrl.service.places import check_place, run_folder
from mrl.service.record import (
    RECIPE,
    REMOVED,
    STATE,
    Loop,
    State,
    Tenant,
    check_name,
    name_of,
    read_past,
    read_tenants,
    tenant_folder,
)
from mrl.service.sessions.operations import Operations
from mrl.service.sessions.recipe import check_session, session_tree
from mrl.system import disk
from mrl.system.disk import refusing
from mrl.system.files import lock_folder, sync, write_whole
from mrl.system.printable import encodable
from mrl.system.processes import Closing

AFTER: Mapping[str, tuple[State, ...]] = {
    "queued": ("running", "paused", "done", "removed"),
    "running": ("paused", "done", "removed"),
    "paused": ("queued", "done", "removed"),
    "done": ("removed",),
    "removed": (),
}
"""The states that may follow each state. A paused tenant may become "done", because the step that
was under way when it was paused may have been its last."""
MAX_REASON_CHARS = 500
MIN_WEIGHT = 1e-6


class NoTenant(InputError):
    """There is no tenant of that name."""


class WrongState(InputError):
    """The tenant's state does not allow the change."""


class Registry(Closing):
    """The tenants of a service folder, which only one service can have open at a time.

    When the folder is opened, tenants whose recipe no longer fits the service are paused. Raises
    InputError if another service has the folder open, or if a file in the folder is damaged.
    """

    def __init__(self, service: ServiceConfig) -> None:
        self.service = service
        self.root = Path(os.path.realpath(service.output_dir))
        self._changing = threading.RLock()
        self.operations = Operations()
        """The operations of all sessions; they are not on disk."""
        self.kept: dict[str, str] = {}
        """For each tenant whose newest state could not be written to disk, the reason in one line. Such
        a state is only in memory until `write_kept` succeeds."""
        with ExitStack() as undo, refusing(self.root):
            (self.root / "tenants" / REMOVED).mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.root, "service")
            undo.callback(self._lock.close)
            for folder in (self.root.parent, self.root, self.root / "tenants"):
                sync(folder)
            for partial in (self.root / "tenants").glob(".*.new"):  # an `add` was killed
                shutil.rmtree(partial)
            self._tenants = {tenant.name: tenant for tenant in read_tenants(self.root)}
            self._past = read_past(self.root)
            dump_recipe(service, self.root / "service.yaml")
            self._settle_all()
            undo.pop_all()

    def close(self) -> None:
        """Unlock the folder for another service. Harmless when repeated."""
        self._lock.close()

    def tenants(self) -> list[Tenant]:
        """Return the tenants that were not removed, in the order in which they joined."""
        with self._changing:
            kept = [each for each in self._tenants.values() if each.state != "removed"]
        return sorted(kept, key=lambda tenant: tenant.sequence)

    def get(self, name: str) -> Tenant:
        """Return the newest tenant with this name, which may have been removed. Raises NoTenant if
        no tenant ever had this name."""
        with self._changing:
            if (found := self._tenants.get(name)) is None:
                known = ", ".join(t.name for t in self.tenants()) or "none"
                raise NoTenant(f"there is no tenant {name[:80]!r}; there are: {known}")
            return found

    def recipe(self, name: str) -> Recipe:
        """Return the resolved recipe of a tenant. Raises InputError if its file is damaged, or if
        the recipe no longer fits the service."""
        file = tenant_folder(self.root, self.get(name).name) / RECIPE
        try:
            tree = yaml.safe_load(file.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InputError(f"{file} is damaged: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise InputError(f"{file} is damaged: it holds no keys")
        return resolve_tenant(self.service, tree, str(file), is_record=True)

    def add(
        self,
        name: str,
        tree: Mapping[str, Any],
        *,
        weight: float = 1.0,
        is_record: bool = False,
        loop: Loop = "recipe",
        request: str = "",
    ) -> Tenant:
        """Add a tenant with the state "queued", and return it. If `loop` is "client", the tenant is
        a session.

        `tree`: the keys of the tenant's recipe, whose output_dir must be absolute. `is_record`:
        whether the recipe was resolved before (see `mrl.service.agreement`). `request`: a digest of
        the request to add the tenant, or empty. If the same request has added a tenant before,
        nothing is added, and that tenant is returned in its present state. Raises InputError if an
        argument is not allowed, or if the service has no room for the tenant.
        """
        check_name(name)
        if (known := self._of_request(name, request)) is not None:
            return known
        if not MIN_WEIGHT <= weight <= 1 / MIN_WEIGHT:
            raise InputError(
                f"weight is {weight:g}; expected a number from {MIN_WEIGHT:g} to {1 / MIN_WEIGHT:g}"
            )
        if loop == "client":
            tree = session_tree(tree)
        recipe = resolve_tenant(self.service, tree, f"the recipe of {name}", is_record=is_record)
        if loop == "client":
            check_session(recipe)
        output = run_folder(self.root, recipe.output_dir)
        recipe = recipe.model_copy(update={"output_dir": str(output)})
        with self._changing, refusing(self.root):
            if (known := self._of_request(name, request)) is not None:
                return known  # both requests arrived at the same time
            past = (*self._tenants.values(), *self._past)
            check_place(name, output, self.tenants(), past, self.service.tenants.max_number)
            tenant = Tenant(
                name=name,
                state="queued",
                sequence=max((t.sequence for t in past), default=0) + 1,
                weight=weight,
                output_dir=str(output),
                num_steps=recipe.train.num_steps,
                loop=loop,
                request=request,
            )
            self._write_new(tenant, recipe)
            self._tenants[name] = tenant
            return tenant

    def _of_request(self, name: str, request: str) -> Tenant | None:
        """Return the tenant that the same request has added before; None if there is none or
        `request` is empty."""
        with self._changing:
            found = [*self._past, *self._tenants.values()] if request else []
            return next((t for t in found if (t.name, t.request) == (name, request)), None)

    def move(self, name: str, state: State, reason: str = "", number: int | None = None) -> Tenant:
        """Change the state of a tenant, and return its new record. If `number` is given, it must
        equal the tenant's `sequence`.

        When a paused tenant is queued again, its recipe is checked against the service, and the
        tenant gets a new id (`Tenant.incarnation`). When a session is paused, done or removed, the
        operations in its queue are lost. Raises NoTenant, WrongState if the tenant's present state
        or sequence does not allow the change, and InputError if the recipe no longer fits.
        """
        found = self.get(name)
        if number not in (None, found.sequence):
            raise WrongState(
                f"tenant {name} now has the sequence {found.sequence}, expected {number}; it is "
                "another tenant of that name: look at it again"
            )
        self._moved(found, state, reason)  # raises WrongState before the recipe is read
        # Reading a recipe can import code of the tenant, so the lock is not held meanwhile.
        recipe = self.recipe(name) if state == "queued" else None
        with self._changing, refusing(self.root):
            tenant = self._moved(self.require_same(found), state, reason)
            if recipe is not None:
                dump_recipe(recipe, tenant_folder(self.root, name) / RECIPE)
            self._write(tenant)
            self._close_unless_active(tenant)
            return tenant

    def try_move(self, incarnation: str, state: State, reason: str = "") -> bool:
        """Change the state of the tenant that has the id `incarnation` (see `Tenant.incarnation`),
        as `move` does. Return whether the state was changed. `state` is not "queued", because only
        `move` checks the recipe.

        Nothing is changed if a user has changed the tenant meanwhile, so that its id or state no
        longer allows the change. If the new state cannot be written to disk, for whatever reason, it
        is kept in memory: see `kept`.
        """
        name = name_of(incarnation)
        try:
            with self._changing:
                if (tenant := self.get(name)).incarnation != incarnation:
                    return False
                moved = self._moved(tenant, state, reason)
                try:
                    self._write(moved)
                except OSError as error:
                    self._tenants[name] = moved
                    self.kept[name] = disk.describe(error, self.root)
                self._close_unless_active(moved)
        except (NoTenant, WrongState):
            return False
        return True

    def _close_unless_active(self, tenant: Tenant) -> None:
        """Let the operations in the queue of a session be lost, unless it is queued or running."""
        if tenant.state not in ("queued", "running"):
            self.operations.close(tenant.incarnation)

    def write_kept(self) -> list[str]:
        """Try again to write the states of the tenants in `kept`. Return the names of the tenants
        whose states were written."""
        written: list[str] = []
        with self._changing:
            for name in sorted(self.kept):
                with suppress(OSError):
                    self._write(self._tenants[name])
                    written.append(name)
        return written

    def require_same(self, tenant: Tenant) -> Tenant:
        """Return the current record of `tenant`. Raises WrongState if the tenant has been resumed
        since `tenant` was read, or if another tenant has its name now."""
        if (found := self.get(tenant.name)).incarnation != tenant.incarnation:
            raise WrongState(f"tenant {tenant.name} was changed by somebody else; look at it again")
        return found

    def _moved(self, tenant: Tenant, state: State, reason: str) -> Tenant:
        """Return the tenant's record with another state. Raises WrongState if the present state
        does not allow it."""
        if state not in AFTER[tenant.state]:
            why = f" ({tenant.reason})" if tenant.reason else ""
            before = " or ".join(each for each, after in AFTER.items() if state in after)
            raise WrongState(
                f"tenant {tenant.name} is {tenant.state}{why}; it cannot become {state} from there, "
                f"only from {before}"
            )
        words = encodable(" ".join(reason.split())[:MAX_REASON_CHARS]) if state == "paused" else ""
        again = tenant.resumed + (state == "queued")
        return tenant.model_copy(update={"state": state, "reason": words, "resumed": again})

    def _settle_all(self) -> None:
        """Update the stored recipes of queued and running tenants with the service's values.

        Tenants whose recipe no longer fits, or cannot be written, are paused. Reading a recipe can run
        code of its tenant, so `Crashes` counts it as the tenant's work. Tenants during whose work the
        service ended too often are paused, and their recipes are not read.
        """
        crashes = Crashes(self.root)
        crash_looping = crashes.pop_crash_looping()
        for tenant in self.tenants():
            if tenant.state not in ("queued", "running"):
                continue
            if tenant.incarnation in crash_looping:
                self.try_move(tenant.incarnation, "paused", REASON)
                console.warning(f"tenant {tenant.name} is paused: {REASON}")
                continue
            crashes.begin(tenant.incarnation, -1)
            try:
                recipe = self.recipe(tenant.name)  # can import code of the tenant
                dump_recipe(recipe, tenant_folder(self.root, tenant.name) / RECIPE)
            except InputError as error:
                self.try_move(tenant.incarnation, "paused", str(error))
            except OSError as error:
                if disk.refusal(error, self.root):  # then no tenant could write anything
                    raise
                why = disk.describe(error, self.root)
                self.try_move(tenant.incarnation, "paused", why)
                console.warning(f"tenant {tenant.name} is paused: {why}")
        crashes.end()

    def _write_new(self, tenant: Tenant, recipe: Recipe) -> None:
        """Write the folder of a new tenant under a temporary name, then rename it. The folder of a
        removed tenant with the same name is moved to `.removed`."""
        place = tenant_folder(self.root, tenant.name)
        new = place.with_name(f".{tenant.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        dump_recipe(recipe, new / RECIPE)
        write_whole(new / STATE, tenant.model_dump_json() + "\n", durable=True)
        if (past := self._tenants.get(tenant.name)) is not None:
            place.rename(place.parent / REMOVED / f"{past.sequence}-{past.name}")
            sync(place.parent / REMOVED)
            self._past.append(past)
        new.rename(place)
        sync(place.parent)

    def _write(self, tenant: Tenant) -> None:
        file = tenant_folder(self.root, tenant.name) / STATE
        write_whole(file, tenant.model_dump_json() + "\n", durable=True)
        self._tenants[tenant.name] = tenant
        self.kept.pop(tenant.name, None)
