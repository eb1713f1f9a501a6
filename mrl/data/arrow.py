"""Reads parquet files and data set folders with the package pyarrow, and data sets on the Hugging Face
hub with the package datasets.

`pip install 'mrl[data]'` installs both packages. A function whose package is missing raises
InputError.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mrl.data.splits import check_split
from mrl.errors import InputError

Rows = Iterator[tuple[str, dict[str, Any]]]

NUM_ROWS = 256
"""Number of rows that are converted at a time from Arrow to Python objects."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".txt")


def read_parquet(path: Path) -> Rows:
    """Yield `(source, row)` for every row of a parquet file; `source` names the row in messages.
    Raises InputError if the file is not parquet."""
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    with path.open("rb") as opened:
        try:
            file = parquet.ParquetFile(opened)
            batches = file.iter_batches(batch_size=NUM_ROWS)
            yield from _rows(batches, str(path))
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # such as a column's name
            raise InputError(f"{path}: not readable as parquet: {_line(error)}") from None


def read_folder(folder: Path, split: str) -> Rows:
    """Yield `(source, row)` for every row of a folder that `save_to_disk` of a `Dataset` or
    `DatasetDict` wrote; `source` names the row in messages. `split` chooses one of a
    `DatasetDict`. Of a `Dataset`, it must be `train`, or the split that the `Dataset` was.

    Raises InputError if the folder was not written by `save_to_disk`, does not have the split, or
    cannot be read.
    """
    is_chosen = False
    if (folder / "dataset_dict.json").is_file():
        splits = _texts_in(folder / "dataset_dict.json", lambda content: content["splits"])
        if split not in splits:
            raise InputError(
                f"{folder}: no split {split!r}, it has {', '.join(splits)}; set `split`"
            )
        folder, is_chosen = folder / split, True
    if not (folder / "state.json").is_file():
        raise InputError(
            f"{folder}: not a folder written by save_to_disk (it has no state.json); for a folder of "
            f"files give a glob such as {folder}/*.parquet"
        )
    if not is_chosen and [split] != _texts_in(folder / "state.json", lambda c: [c.get("_split")]):
        check_split(str(folder), split, "a Dataset without a DatasetDict has")
    pyarrow = _pyarrow(folder)
    first = 1
    names = _texts_in(
        folder / "state.json", lambda content: [each["filename"] for each in content["_data_files"]]
    )
    for file in (folder / name for name in names):
        try:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    pieces = (batch.slice(i, NUM_ROWS) for i in range(0, batch.num_rows, NUM_ROWS))
                    yield from _rows(pieces, str(folder), first)
                    first += batch.num_rows
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise InputError(f"{file}: not readable as Arrow: {_line(error)}") from None


def is_hub_id(path: str) -> bool:
    """Return whether `path` looks like a hub id: it has the form `owner/name`, and does not end
    with the suffix of a data file. The caller must have checked that there is no local file or
    folder `path`."""
    return bool(_HUB_ID.fullmatch(path)) and not path.endswith(_FILE_SUFFIXES)


def read_hub(hub_id: str, subset: str | None, split: str) -> Rows:
    """Yield `(source, row)` for every row of a data set on the Hugging Face hub; `source` names the
    row in messages. The data set is downloaded, or taken from the local cache.

    Raises InputError if the data set cannot be loaded, with a message of one line.
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
    except Exception as error:  # from the network, the hub or the builder
        raise InputError(
            f"{what} cannot be loaded ({type(error).__name__}: {_line(error)}); without a network, "
            "download it elsewhere and give a folder written by save_to_disk, or a file"
        ) from None
    first = 1
    piece: Any  # pyarrow.Table, in this format; the annotations of datasets say a dict
    for piece in table.iter(batch_size=NUM_ROWS):
        yield from _rows(piece.to_batches(), hub_id, first)
        first += piece.num_rows


def _rows(batches: Any, place: str, first: int = 1) -> Rows:
    """Yield `(source, row)` for every row of Arrow record batches. `source` is `PLACE row N`, where
    N is the row's number and the first row has the number `first`.

    Raises InputError for duplicate column names, and for values that have no JSON form.
    """
    for batch in batches:
        _check_names(batch.schema, place)
        for row in _to_python(batch, place, first):
            source = f"{place} row {first}"
            yield (
                source,
                {
                    name: _plain(value, name, source)
                    for name, value in row.items()
                    if not name.startswith("__index_level_")  # added by pandas
                },
            )
            first += 1


def _to_python(batch: Any, place: str, first: int) -> list[dict[str, Any]]:
    """Return the rows of a record batch, the first of which has the number `first`.

    Raises InputError for a value that Python cannot represent, such as a date after the year 9999,
    and UnicodeDecodeError for text that is not UTF-8.
    """
    unreadable = (ValueError, OverflowError, LookupError)
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        raise
    except unreadable:
        for number, name in itertools.product(range(batch.num_rows), batch.schema.names):
            try:
                batch.column(name)[number].as_py()
            except unreadable as error:
                raise InputError(
                    f"{place} row {first + number}: column {name!r} has a value that cannot be read: "
                    f"{_line(error)}; write it as text, or leave the column out of the file"
                ) from None
        raise


def _check_names(fields: Any, place: str, within: str = "the columns") -> None:
    """Raise InputError if an Arrow schema, or a struct in it, has duplicate field names, because a
    Python dict would keep only the last value of such a name.

    `fields` are the fields of the schema or struct, and `within` describes them in the message.
    """
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise InputError(f"{place}: got {within} {', '.join(names)}, expected each once")
    for field in fields:
        inner = [field.type.field(number) for number in range(field.type.num_fields)]
        _check_names(inner, place, f"in {field.name} the keys")


def _plain(value: Any, column: str, source: str) -> Any:
    """Convert a value, also inside lists and dicts, to JSON types: dates and times to ISO strings,
    decimals to strings, bytes to base64. Raises InputError for a type that has no JSON form."""
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
        f"{source}: column {column!r} holds {type(value).__name__}, which JSON cannot represent; write "
        "it as text or a number"
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


def _texts_in(file: Path, find: Callable[[Any], list[str]]) -> list[str]:
    """Return the strings that `find` returns for the content of a JSON file of `save_to_disk`."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: {_line(error)}") from None
    try:
        return [str(each) for each in find(content)]
    except (LookupError, TypeError, AttributeError):
        raise InputError(
            f"{file}: not what save_to_disk writes; save the data set again, or give other files"
        ) from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
