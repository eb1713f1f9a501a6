"""The checkpoints of models: what is listed, how long it is kept, and how it is exported as a PEFT
folder.

A checkpoint is recorded when its operation is posted. It is complete if its folder is in the run folder
of its model; this is checked at each use.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from mrl.errors import DiskFailed
from mrl.run import console
from mrl.service.sessions.saved import remove_saved
from mrl.tinker import bodies, paths
from mrl.tinker.backend import FOLDERS, NOT_YOURS, UNFINISHED, Backend, Row, saved_name
from mrl.web.limits import Refused
from parallel.checkpoint.hf_export import export_checkpoint

EPHEMERAL = "ephemeral."
"""Prefix of the names of samplers that a client made without a name. They are not listed, and only the
newest `KEPT_EPHEMERAL` of a model are kept."""
KEPT_EPHEMERAL = 16
COPIED = "copy."
"""Prefix of the names of copies. Checkpoints of closed models and those of `save_state` are copied
before they are sampled."""
EXPORTS = "exports"
"""The folder of a run with the PEFT folders of its checkpoints."""
PENDING = "this checkpoint is being written; wait for the result of the call that saves it"
MAX_SHARD_BYTES = 2 << 30
Answer = dict[str, Any]


class Checkpoints:
    """The checkpoints of all users. Methods raise Refused for what the caller does not own."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._ledger = backend, backend.ledger
        self._exporting = threading.Lock()

    def note(
        self,
        path: paths.Path,
        owner: str,
        request: str,
        ttl_s: int | None,
        metadata: Any,
    ) -> Row | None:
        """Record a checkpoint that the operation of `request` writes. A checkpoint that already has
        the path is replaced; return its record, None if there is none."""
        key = str(path)
        if (before := self._ledger.get("checkpoints", key)) is not None:
            self._remove_export(before)
        with self._ledger.together():
            self._ledger.remove("checkpoints", key)
            self._ledger.add(
                "checkpoints",
                path=key,
                run=path.run,
                kind=path.kind,
                name=path.name,
                owner=owner,
                folder="",
                size=0,
                created=time.time(),
                expires=None if ttl_s is None else time.time() + ttl_s,
                metadata=metadata,
                request=request,
            )
        self._sweep(path.run)
        return before

    def put_back(self, path: paths.Path, before: Row | None) -> None:
        """Undo `note`, which returned `before`: the operation that was to write the checkpoint was
        refused."""
        with self._ledger.together():
            self._ledger.remove("checkpoints", str(path))
            if before is not None:
                self._ledger.add("checkpoints", **before)

    def exists(self, path: paths.Path) -> bool:
        """Whether a model has a checkpoint of this kind and name."""
        return self._settled(self._ledger.get("checkpoints", str(path))) is not None

    def folder(
        self, owner: str, path: str, kinds: Sequence[paths.Kind] = ("training", "sampler")
    ) -> Path:
        """Return the folder of a checkpoint that `owner` owns, of one of these kinds."""
        row = self.require(owner, path)
        if row["kind"] not in kinds:
            raise Refused(
                400, f"{path} is of the kind {row['kind']}; expected one of {', '.join(kinds)}"
            )
        return Path(row["folder"])

    def require(self, owner: str, path: str) -> Row:
        """Return a checkpoint that `owner` owns and that is complete."""
        row = self._settled(self._ledger.get("checkpoints", str(paths.parse(path))))
        if row is None or row["owner"] != owner:
            raise Refused(404, NOT_YOURS.format(what="checkpoint", key=path[:300]))
        if not row["folder"]:
            raise Refused(404, PENDING)
        return row

    def is_of(self, path: str, request: str) -> bool:
        """Whether a path names the checkpoint that the request `request` has written or will write. If
        not, the checkpoint was removed, and another may have its path."""
        row = self._ledger.get("checkpoints", str(paths.parse(path)))
        return row is not None and row["request"] == request

    def of_run(self, run: str) -> list[Answer]:
        """Return the complete checkpoints of a model as the SDK's Checkpoint, the oldest first."""
        rows = [self._settled(row) for row in self._ledger.find("checkpoints", run=run)]
        return [shown(row) for row in rows if is_listed(row)]

    def of_user(self, owner: str, offset: int, limit: int) -> Answer:
        """Return a page of a user's checkpoints, the newest first."""
        rows = [self._settled(row) for row in self._ledger.find("checkpoints", owner=owner)]
        found = [shown(row) for row in reversed(rows) if is_listed(row)]
        return page("checkpoints", found, offset, limit)

    def set_ttl(self, owner: str, path: str, body: bodies.Ttl) -> None:
        """Set how long a checkpoint is kept from now on, in seconds; None keeps it forever."""
        row, ttl_s = self.require(owner, path), body.ttl_seconds
        self._ledger.set(
            "checkpoints", row["path"], expires=None if ttl_s is None else time.time() + ttl_s
        )

    def delete(self, owner: str, path: str) -> None:
        """Remove a checkpoint and its files."""
        self._remove(self.require(owner, path))

    def weights_info(self, owner: str, body: bodies.WeightsInfo) -> Answer:
        """Return the shape of a checkpoint's adapter."""
        row = self.require(owner, body.tinker_path)
        model = self._backend.owned("models", owner, row["run"])
        return {
            "base_model": model["base"],
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": model["rank"],
            "train_unembed": bool(model["unembed"]),
            "train_mlp": bool(model["mlp"]),
            "train_attn": bool(model["attn"]),
        }

    def export(self, owner: str, path: str) -> Path:
        """Return the PEFT folder of a checkpoint. It is written when it is first asked for."""
        row = self.require(owner, path)
        target = self._exported(row)
        if target is None:
            raise Refused(404, NOT_YOURS.format(what="checkpoint", key=path[:300]))
        with self._exporting:  # the second of two callers finds it
            if not target.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                export_checkpoint(
                    Path(row["folder"]), target, base=None, max_bytes=MAX_SHARD_BYTES, notes={}
                )
        return target

    def _settled(self, row: Row | None) -> Row | None:
        """Return a checkpoint with its folder, if its operation is done; None if there is none, if it
        was not written, or if it has expired."""
        if row is None:
            return None
        if has_expired(row):
            self._expire(row)
            return None
        model = self._ledger.get("models", row["run"])
        row["tenant"] = "" if model is None else model["tenant"]
        if row["folder"]:
            return row if Path(row["folder"]).is_dir() else None
        if self._is_pending(row):
            return row
        if (found := self._backend.saved(row["tenant"], row["kind"], row["name"])) is None:
            self._forget(row)
            return None
        row["folder"], row["size"] = str(found.folder), found.num_bytes
        self._ledger.set("checkpoints", row["path"], folder=row["folder"], size=row["size"])
        return row

    def _is_pending(self, row: Row) -> bool:
        """Whether the operation that writes a checkpoint is under way."""
        request = None if row["folder"] else self._ledger.get("requests", row["request"])
        return request is not None and self._backend.look(request)["state"] in UNFINISHED

    def _expire(self, row: Row) -> None:
        """Remove a checkpoint that its user no longer asks for. One that is being written, or whose
        files cannot be removed, is removed by a later call."""
        if self._is_pending(row):
            return
        try:
            self._remove(row)
        except (DiskFailed, OSError) as error:
            console.warning(f"{row['path']} is not removed: {' '.join(str(error).split())[:300]}")

    def _remove(self, row: Row) -> None:
        """Remove a checkpoint: its record last, without which its files could not be removed."""
        self._remove_export(row)
        model = self._ledger.get("models", row["run"])
        if model is not None:
            name = saved_name(row["kind"], row["name"])
            remove_saved(self._backend.run_folder(model["tenant"]), FOLDERS[row["kind"]], name)
        name = copy_name(row)
        for copy in (self._backend.registry.root / "runs").glob(f"*/samplers/{name}"):
            remove_saved(copy.parents[1], "samplers", name)
        self._forget(row)

    def _forget(self, row: Row) -> None:
        """Remove the record of a checkpoint, unless another one has its path now."""
        with self._ledger.together():
            now = self._ledger.get("checkpoints", row["path"])
            if now is not None and now["created"] == row["created"]:
                self._ledger.remove("checkpoints", row["path"])

    def _remove_export(self, row: Row) -> None:
        if (exported := self._exported(row)) is not None:
            shutil.rmtree(exported, ignore_errors=True)

    def _exported(self, row: Row) -> Path | None:
        """Return where the PEFT folder of a checkpoint is written; None if its model is unknown."""
        if (model := self._ledger.get("models", row["run"])) is None:
            return None
        name = f"{row['name']}.{row['created']:.6f}"  # a checkpoint that replaces it gets its own
        return self._backend.run_folder(model["tenant"]) / EXPORTS / row["kind"] / name

    def _sweep(self, run: str) -> None:
        """Remove what has expired of a model, and the oldest of its samplers without a name."""
        rows = self._ledger.find("checkpoints", run=run)
        for row in filter(has_expired, rows):
            self._expire(row)
        unnamed = [row for row in rows if is_ephemeral(row) and not has_expired(row)]
        for row in unnamed[:-KEPT_EPHEMERAL]:
            if (settled := self._settled(row)) is not None and settled["folder"]:
                self._expire(settled)


def copy_name(row: Row) -> str:
    """Return the name of the copies of a checkpoint. One that replaces it has another."""
    content = f"{row['path']} {row['created']}"
    return COPIED + hashlib.sha256(content.encode()).hexdigest()[:32]


def has_expired(row: Row) -> bool:
    """Whether the time for which a checkpoint is kept is over."""
    return row["expires"] is not None and row["expires"] < time.time()


def is_ephemeral(row: Row) -> bool:
    """Whether a checkpoint is a sampler that a client made without a name."""
    return row["kind"] == "sampler" and row["name"].startswith(EPHEMERAL)


def is_listed(row: Row | None) -> TypeGuard[Row]:
    """Whether a checkpoint is complete and was named by its user."""
    return row is not None and bool(row["folder"]) and not is_ephemeral(row)


def shown(row: Row) -> Answer:
    """Return a checkpoint as the SDK's Checkpoint."""
    path = paths.parse(row["path"])
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": path.kind,
        "time": as_time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["size"],
        "public": False,
        "user_metadata": row["metadata"],
        "expires_at": None if row["expires"] is None else as_time(row["expires"]),
    }


def page(name: str, rows: list[Any], offset: int, limit: int) -> Answer:
    """Return a part of a list with the SDK's Cursor."""
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    return {name: rows[offset : offset + limit], "cursor": cursor}


def as_time(seconds: float) -> str:
    """Return seconds since 1970 in the API's form of a time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
