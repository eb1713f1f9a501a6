"""Reads parquet files and data set folders through pyarrow, and data sets of the hub by `datasets`.

Both come with `pip install 'mrl[data]'`. Rows are made from NUM_ROWS rows of the file at a time.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import InputError

Rows = Iterator[tuple[str, dict[str, Any]]]

NUM_ROWS = 256
"""Rows that are in memory as Arrow and as Python objects at the same time."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".txt")


def read_parquet(path: Path) -> Rows:
    """Yield the rows of a parquet file. Raises InputError where it is none."""
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    with path.open("rb") as opened:
        try:
            file = parquet.ParquetFile(opened)
            batches = file.iter_batches(batch_size=NUM_ROWS)
            yield from _rows(batches, str(path))
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # of a column's name
            raise InputError(f"{path}: not readable as parquet: {_line(error)}") from None


def read_folder(folder: Path, split: str) -> Rows:
    """Yield the rows of a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.

    Raises InputError where it is none, or has no such split.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise InputError(
                f"{folder}: no split {split!r}, it has {', '.join(splits)}; set `split`"
            )
        folder = folder / split
    if not (folder / "state.json").is_file():
        raise InputError(
            f"{folder}: not a folder written by save_to_disk (it has no state.json); for a folder of "
            f"files give a glob such as {folder}/*.parquet"
        )
    pyarrow = _pyarrow(folder)
    first = 1
    for each in _json(folder / "state.json")["_data_files"]:
        file = folder / each["filename"]
        try:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    pieces = (batch.slice(i, NUM_ROWS) for i in range(0, batch.num_rows, NUM_ROWS))
                    yield from _rows(pieces, str(folder), first)
                    first += batch.num_rows
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise InputError(f"{file}: not readable as Arrow: {_line(error)}") from None


def is_hub_id(path: str) -> bool:
    """Return whether a path that does not exist may be a data set of the hub, `owner/name`."""
    return bool(_HUB_ID.fullmatch(path)) and not path.endswith(_FILE_SUFFIXES)


def read_hub(hub_id: str, subset: str | None, split: str) -> Rows:
    """Yield the rows of a data set of the Hugging Face hub: downloaded, or taken from its cache.

    Raises InputError where that fails, in one line.
    """
    what = f"{hub_id}: no such file or folder here, and as a data set of the Hugging Face hub it"
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{what} needs the package datasets; pip install 'mrl[data]', or give a path that exists"
        ) from None
    try:
        table = datasets.load_dataset(hub_id, subset, split=split).with_format("arrow")
    except Exception as error:  # of the network, the hub and the builder
        raise InputError(
            f"{what} cannot be loaded ({type(error).__name__}: {_line(error)}); without a network, "
            "download it elsewhere and give a folder written by save_to_disk, or a file"
        ) from None
    first = 1
    for piece in table.iter(batch_size=NUM_ROWS):
        yield from _rows(piece.to_batches(), hub_id, first)
        first += piece.num_rows


def _rows(batches: Any, place: str, first: int = 1) -> Rows:
    """Yield the rows of Arrow record batches; `first` is the number of the first row.

    Raises InputError for duplicate columns.
    """
    for batch in batches:
        _check_names(batch.schema, place)
        for row in batch.to_pylist():
            source = f"{place} row {first}"
            yield (
                source,
                {
                    name: _plain(value, name, source)
                    for name, value in row.items()
                    if not name.startswith("__index_level_")  # which pandas adds
                },
            )
            first += 1


def _check_names(fields: Any, place: str, within: str = "the columns") -> None:
    """Raise InputError if a schema, or an object in it, has a duplicate name; Python keeps the last."""
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise InputError(f"{place}: got {within} {', '.join(names)}, expected each once")
    for field in fields:
        inner = [field.type.field(number) for number in range(field.type.num_fields)]
        _check_names(inner, place, f"in {field.name} the keys")


def _plain(value: Any, column: str, source: str) -> Any:
    """Return the value as JSON can hold it: dates as ISO text, decimals as text, bytes as base64."""
    if isinstance(value, dict):
        return {key: _plain(inner, column, source) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, column, source) for inner in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise InputError(
        f"{source}: column {column!r} holds {type(value).__name__}, which JSON cannot hold; write it "
        "as text or a number"
    )


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise InputError(
            f"{path}: reading parquet and data set folders needs the package pyarrow; pip install "
            "'mrl[data]'"
        ) from None
    return pyarrow


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
