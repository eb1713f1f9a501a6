"""What the API remembers in the service folder: clients' sessions, their models, samplers, requests and
checkpoints, each with the user that owns it.

SERVICE_DIR/tinker/ledger.sqlite. A write is complete or absent after `kill -9`. What an operation
computes is not here: sessions of the service keep it (`mrl.service.sessions`).
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from mrl.errors import DiskFailed, InputError
from mrl.system.processes import Closing

FILE = "ledger.sqlite"
TABLES: dict[str, tuple[str, ...]] = {
    "sessions": ("id", "owner", "name", "metadata", "created", "finished"),
    "models": (
        *("id", "session", "owner", "base", "tenant", "sequence", "rank", "seed"),
        *("attn", "mlp", "unembed", "metadata", "created"),
    ),
    "samplers": (
        *("id", "session", "owner", "base", "model", "name", "path", "tenant", "clones"),
        *("created", "saved"),
    ),
    "hosts": ("tenant", "sequence", "session", "created"),
    "requests": ("id", "owner", "kind", "digest", "tenant", "operation", "about", "created"),
    "checkpoints": (
        *("path", "run", "kind", "name", "owner", "folder", "size", "created", "expires"),
        *("metadata", "request"),
    ),
    "refused": ("tenant", "what"),
}
"""The columns of each table; the first is the key."""
INDEXES: dict[str, tuple[str, ...]] = {
    "sessions": ("owner",),
    "models": ("session", "owner", "tenant"),
    "samplers": ("session", "tenant"),
    "hosts": (),
    "requests": ("tenant", "created"),
    "checkpoints": ("run", "owner"),
    "refused": (),
}
"""The other columns by which rows are looked up."""
JSON_COLUMNS = frozenset({"metadata", "about"})
Row = dict[str, Any]


class Ledger(Closing):
    """The tables, in one file. Any thread may call the methods. They raise DiskFailed if the file
    cannot be written; the constructor raises InputError if it is damaged."""

    def __init__(self, folder: Path) -> None:
        self._using = threading.RLock()
        file = folder / FILE
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._base = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            self._base.row_factory = sqlite3.Row
            self._base.execute("pragma journal_mode=wal")
            self._base.execute("pragma synchronous=normal")
            for table, columns in TABLES.items():
                names = ", ".join([f"{columns[0]} primary key", *columns[1:]])
                self._base.execute(f"create table if not exists {table} ({names})")
                self._add_missing(table, columns)
                for column in INDEXES[table]:
                    name = f"{table}_by_{column}"
                    self._base.execute(f"create index if not exists {name} on {table} ({column})")
        except (sqlite3.Error, OSError) as error:
            raise InputError(
                f"{file} cannot be used: {error}; bring it back from a copy, or move it away to forget "
                "the models and checkpoints of the Tinker API"
            ) from None

    def _add_missing(self, table: str, columns: tuple[str, ...]) -> None:
        """Add the columns that a file of an earlier mrl lacks. They are null in its rows."""
        there = {row["name"] for row in self._base.execute(f"pragma table_info({table})")}
        for column in columns:
            if column not in there:
                self._base.execute(f"alter table {table} add column {column}")

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        self._base.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the writes of the block take effect together, or not at all after an error or `kill -9`.
        Blocks cannot be nested."""
        with self._using:
            self._run("begin immediate")
            try:
                yield
                self._run("commit")
            except BaseException:
                with suppress(DiskFailed):  # there is nothing left to undo
                    self._run("rollback")
                raise

    def add(self, table: str, **row: Any) -> Row | None:
        """Add a row. If a row has its key already, add nothing and return that row."""
        with self._using:
            if (known := self.get(table, row[TABLES[table][0]])) is not None:
                return known
            names = list(row)
            marks = ", ".join("?" for _ in names)
            self._run(
                f"insert into {table} ({', '.join(names)}) values ({marks})", _stored(row).values()
            )
            return None

    def get(self, table: str, key: str) -> Row | None:
        """Return the row with this key; None if there is none."""
        found = self.find(table, **{TABLES[table][0]: key})
        return found[0] if found else None

    def find(self, table: str, **equal: Any) -> list[Row]:
        """Return the rows whose columns have these values, in the order in which they were added."""
        where = " and ".join(f"{name} = ?" for name in equal) or "1"
        return self._run(f"select * from {table} where {where} order by rowid", equal.values())

    def newest(self, table: str, **equal: Any) -> Row | None:
        """Return the row that was added last of those whose columns have these values."""
        where = " and ".join(f"{name} = ?" for name in equal) or "1"
        found = self._run(
            f"select * from {table} where {where} order by rowid desc limit 1", equal.values()
        )
        return found[0] if found else None

    def set(self, table: str, key: str, **values: Any) -> None:
        """Change columns of the row with this key."""
        pairs = ", ".join(f"{name} = ?" for name in values)
        self._run(
            f"update {table} set {pairs} where {TABLES[table][0]} = ?",
            [*_stored(values).values(), key],
        )

    def remove(self, table: str, key: str) -> None:
        """Remove the row with this key, if there is one."""
        self._run(f"delete from {table} where {TABLES[table][0]} = ?", [key])

    def remove_older(self, table: str, created: float) -> None:
        """Remove the rows that were added before a time."""
        self._run(f"delete from {table} where created < ?", [created])

    def count(self, sampler: str) -> int:
        """Add 1 to the number of clones of a sampler, and return the new number."""
        with self._using:
            self._run("update samplers set clones = clones + 1 where id = ?", [sampler])
            found = self.get("samplers", sampler)
            return 0 if found is None else int(found["clones"])

    def _run(self, statement: str, values: Any = ()) -> list[Row]:
        with self._using:
            try:
                with closing(self._base.execute(statement, list(values))) as found:
                    return [_loaded(dict(row)) for row in found.fetchall()]
            except sqlite3.OperationalError as error:
                raise DiskFailed(f"the ledger of the Tinker API: {error}") from None


def _stored(row: Row) -> Row:
    return {k: json.dumps(v) if k in JSON_COLUMNS else v for k, v in row.items()}


def _loaded(row: Row) -> Row:
    return {k: json.loads(v) if k in JSON_COLUMNS and v else v for k, v in row.items()}
