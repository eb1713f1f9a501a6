"""Reads rows from files: JSON lines, JSON arrays, CSV, parquet, data set folders and the hub.

A row is a dict of JSON types. Each row comes with its `source`, a string for error messages:
`file:line` or `file row N`. Files are read in pieces; only a JSON array is loaded into memory
completely.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mrl.config.data import ENVIRONMENT_TASKS
from mrl.data import arrow
from mrl.data.splits import check_no_subset, check_split
from mrl.errors import InputError
from mrl.system.json_text import each_key_once, unpaired_surrogate

Rows = Iterator[tuple[str, dict[str, Any]]]
Tasks = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
"""Returns the tasks of the recipe's environment as rows, loaded with some arguments."""

_NOT_UTF8 = "not UTF-8 text; convert the file, for example with iconv -f LATIN1 -t UTF-8"
MAX_CELL_CHARS = 1 << 28
"""Maximum number of characters in a cell of a CSV file. Python's default limit is 131,072."""


def read_all_rows(
    paths: Iterable[str | Path],
    *,
    split: str = "train",
    subset: str | None = None,
    tasks: Callable[[], list[dict[str, Any]]] | None = None,
) -> Rows:
    """Yield `(source, row)` for every row of `paths`, in order; `source` names the row in messages.

    A path is a file, a folder written by `save_to_disk`, a glob pattern, or a hub id
    (`owner/name`). The files of a glob are read in the order of their names. `split` applies to
    folders and hub ids, `subset` to hub ids. `tasks` returns the rows of ENVIRONMENT_TASKS. Raises
    InputError if a path does not exist, cannot be read as data, has no rows, has no splits although
    `split` is not `train`, or is no hub id although there is a `subset`.
    """
    for path in paths:
        text = str(path)
        if text == ENVIRONMENT_TASKS or os.path.exists(text) or glob.has_magic(text):
            check_no_subset(text, subset)
        if text == ENVIRONMENT_TASKS:
            check_split(text, split, "the tasks of an environment have")
            yield from _some(_read_tasks(tasks), text)
        elif os.path.isdir(text):
            yield from _some(arrow.read_folder(Path(text), split), text)
        elif os.path.exists(text):
            check_split(text, split, "a file has")
            yield from read_rows(Path(text))
        elif glob.has_magic(text):
            files = sorted(name for name in glob.glob(text, recursive=True) if os.path.isfile(name))
            if not files:
                raise InputError(f"{text}: no file has such a name")
            check_split(text, split, "files have")
            for name in files:
                yield from read_rows(Path(name))
        elif arrow.is_hub_id(text):
            yield from _some(arrow.read_hub(text, subset, split), text)
        else:
            yield from read_rows(Path(text))  # raises InputError with the reason


def read_rows(path: Path) -> Rows:
    """Yield `(source, row)` for every row of one file; `source` names the row in messages. The
    suffix of the file name decides the format; with an unknown suffix it is JSON lines.

    Raises InputError if the file cannot be read, has a bad row, or has no rows. The message starts
    with the path of the file or the source of the row.
    """
    suffix = (path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix).lower()
    if path.exists() and not path.is_file():  # reading a FIFO would wait for its writer
        raise InputError(
            f"{path}: got {_special(path.stat().st_mode)}, expected a file, because data is read more "
            "than once; give the path of a data file"
        )
    if suffix == ".arrow":
        raise InputError(
            f"{path}: an Arrow file is a part of a data set; give the folder that save_to_disk wrote, "
            "or a parquet file"
        )
    if suffix == ".parquet":
        rows = arrow.read_parquet(path)
    elif suffix in (".csv", ".tsv"):
        rows = _read_csv(path, "\t" if suffix == ".tsv" else ",")
    else:
        rows = _read_json(path, may_be_array=suffix == ".json")
    yield from _some(rows, path)


def _read_tasks(tasks: Callable[[], list[dict[str, Any]]] | None) -> Rows:
    if tasks is None:
        raise InputError(
            f"{ENVIRONMENT_TASKS} stands for the tasks of environment.verifiers, which this recipe "
            "does not have; give the path of a data file"
        )
    for number, row in enumerate(tasks(), start=1):
        yield f"{ENVIRONMENT_TASKS} row {number}", row


def _special(mode: int) -> str:
    """Return the kind of a path that is not a regular file, in words such as `a FIFO`. `mode` is
    the path's `st_mode`."""
    kinds = (
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISDIR, "a folder"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


def _some(rows: Rows, path: str | Path) -> Rows:
    empty = True
    for row in _guarded(rows, path):
        empty = False
        yield row
    if empty:
        raise InputError(f"{path}: no rows; one row with `prompt` for each prompt is expected")


def _guarded(rows: Rows, path: str | Path) -> Rows:
    """Yield `rows`, which come from the file `path`. Turns errors of the file system and of gzip
    into InputError."""
    try:
        yield from rows
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: not a whole gzip file: {error}") from None
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise InputError(f"{path}: {reason}; give the path of a data file") from None


def _open(path: Path) -> BinaryIO:
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    return opened(path, "rb")


def _read_json(path: Path, *, may_be_array: bool) -> Rows:
    with _open(path) as file:
        if may_be_array:
            start = file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
            file.seek(0)
            if start == b"[":
                yield from _read_array(file, path)
                return
        for number, line in enumerate(file, start=1):  # bytes, because JSON text may contain U+2028
            if line.strip():
                yield f"{path}:{number}", _parse_row(line, f"{path}:{number}")


def _read_array(file: BinaryIO, path: Path) -> Rows:
    text = file.read()
    expected = "an array of objects is expected"
    rows, is_odd = _parse(text, str(path), expected), _SURROGATE.search(text)
    for number, row in enumerate(rows, start=1):
        source = f"{path} row {number}"
        if is_odd:
            _check_text(row, source)
        yield source, _object(row, source)


def _read_csv(path: Path, delimiter: str) -> Rows:
    csv.field_size_limit(MAX_CELL_CHARS)
    line = 1
    with _open(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        # Without `strict`, a quote that is never closed would hide all rows after it in one cell.
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise InputError(
                    f"{path}:1: got the columns {', '.join(header)}, expected each once"
                )
            line = reader.line_num + 1
            for cells in reader:
                if cells:  # not a blank line
                    if len(cells) != len(header):
                        raise InputError(
                            f"{path}:{line}: {len(cells)} cells, the header has {len(header)}: "
                            f"{', '.join(header)}"
                        )
                    yield f"{path}:{line}", dict(zip(header, cells, strict=True))
                line = reader.line_num + 1
        except UnicodeDecodeError:
            raise InputError(f"{path}:{reader.line_num + 1}: {_NOT_UTF8}") from None
        except csv.Error as error:
            raise InputError(
                f"{path}:{line}: not valid CSV: {error}; put a cell that begins with a quote in "
                "quotes, and double the quotes in it"
            ) from None


def _parse_row(line: bytes, source: str) -> dict[str, Any]:
    row = _parse(line, source, "one JSON object a line is expected")
    if _SURROGATE.search(line):
        _check_text(row, source)
    return _object(row, source)


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Matches an escaped surrogate in JSON, paired or not."""


def _check_text(row: Any, source: str) -> None:
    """Raise InputError if a string in `row` contains an unpaired surrogate, which is not a
    character."""
    if half := unpaired_surrogate(row):
        raise InputError(
            f"{source}: a string contains {half}, half of a surrogate pair and not a character; "
            "write the character itself, or remove it"
        )


def _object(row: Any, source: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        array = "; a JSON array of rows needs a file name that ends with .json"
        hint = array if isinstance(row, list) else ""
        raise InputError(f"{source}: expected a JSON object, got {kind(row)}{hint}")
    return row


def _parse(text: bytes, source: str, expected: str) -> Any:
    """Parse JSON. `expected` ends the message if it is not valid."""
    try:
        # Given bytes, json.loads would accept encoded surrogates.
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=each_key_once)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{source}: {_NOT_UTF8}") from None
    except json.JSONDecodeError as error:
        content = error.doc.rstrip()  # of one line or of several
        column = f"column {min(error.pos, len(content)) + 1}"
        where = f"line {error.lineno} column {error.colno}" if "\n" in content else column
        raise InputError(f"{source}: not valid JSON at {where}: {error.msg}; {expected}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not valid JSON: {error}; {expected}") from None


def kind(value: Any) -> str:
    """Return the JSON name of a value's type, with its article: `an object`."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
