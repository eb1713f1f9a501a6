"""Find what a pickle would import, without running it.

torch's `.metadata` is a pickle, and unpickling runs whatever the file names. A checkpoint may come from
anywhere, and its digests prove only that it is not damaged. So every pickle in a checkpoint is first
read opcode by opcode. The pickle is refused unless everything that it names is a plain record of
torch's checkpoint format.
"""

from __future__ import annotations

import pickletools
import re
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.system.torch_names import TORCH

RECORDS = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset(
    {
        *(f"{RECORDS}.{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties",
          "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
        *(path for name in ("_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout")
          for path in TORCH.names[name].paths.values()),  # of every release: files may be older
        *(f"torch.{name}" for name in ("Size", "float64", "float32", "float16", "bfloat16", "uint8",
          "int64", "int32", "int16", "int8", "bool", "strided")),
        "collections.OrderedDict",
        "collections.defaultdict",
        "pathlib.PosixPath",
    }
)  # fmt: skip
ARCHIVE_START = b"PK\x03\x04"
ENTRIES = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)
"""Matches the path of each file in a torch.save archive, relative to the archive's one top folder. Only
data.pkl is a pickle."""
IMPORTS_BY_NAME = ("GLOBAL", "INST")
IMPORTS_UNSEEN = ("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID")
NEUTRAL = ("PROTO", "FRAME")
TEXT = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")


def check_pickles(folder: Path) -> None:
    """Raise InputError if a pickle of a checkpoint would import anything that is not ALLOWED."""
    try:
        pickles = {
            ".metadata": (folder / ".metadata").read_bytes(),
            "common.pt/data.pkl": archived_pickle(folder / "common.pt"),
        }
    except (OSError, ValueError) as error:
        raise InputError(f"checkpoint {folder}: {error}") from None
    for name, data in pickles.items():
        try:
            foreign = sorted(set(imported(data)) - ALLOWED)
        except ValueError as error:
            raise InputError(f"checkpoint {folder}/{name} is not a pickle: {error}") from None
        if foreign:
            raise InputError(
                f"checkpoint {folder}/{name} would run {', '.join(foreign)} when it is read, which "
                "no checkpoint of mrl does; do not use it, and find out who wrote it"
            )


def archived_pickle(file: Path) -> bytes:
    """Return the one pickle that torch.load would unpickle from a file that torch.save has written.

    The archive is read with torch's own reader, because another reader may find other entries in
    the same bytes; torch's reader, for example, also accepts data.pkl in capitals. Raises
    ValueError for a file that is not such an archive, or that has an unknown or duplicate entry.
    """
    with file.open("rb") as stream:
        start = stream.read(len(ARCHIVE_START))
    if start != ARCHIVE_START:  # torch.load would unpickle the whole file
        raise ValueError(f"{file.name} is not an archive of torch.save")
    try:
        archive = TORCH.take("PyTorchFileReader")(str(file))
        entries = archive.get_all_records()
        foreign = [name for name in entries if not ENTRIES.fullmatch(name)]
        if foreign or len(set(entries)) < len(entries):
            raise ValueError(
                f"{file.name} has {foreign[0]!r} in it, which torch.save does not write; do not use it"
                if foreign
                else f"{file.name} has an entry twice, as torch.save never writes it; do not use it"
            )
        return archive.get_record("data.pkl")
    except RuntimeError as error:
        raise ValueError(f"{file.name}: {str(error).splitlines()[0]}") from None


def imported(data: bytes) -> list[str]:
    """Return the dotted names that unpickling `data` would import. Raises ValueError on broken
    data.

    A name that an opcode takes from the stack is known only if the two values that were pushed last
    are constant strings. A name that is not known is returned as `?`, which is never allowed.
    """
    names: list[str] = []
    pushed: list[Any] = [
        None,
        None,
    ]  # the last two values, or None for one that is not a known text
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name: str = opcode.name
        if name in NEUTRAL:
            continue
        if name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = pushed[-1]
        elif name in TEXT:
            pushed = [pushed[-1], argument]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            pushed = [pushed[-1], memo.get(int(argument or 0))]
        else:
            if name in IMPORTS_BY_NAME:
                names.append(str(argument).replace(" ", "."))
            elif name == "STACK_GLOBAL":
                module, attribute = pushed
                known = isinstance(module, str) and isinstance(attribute, str)
                names.append(f"{module}.{attribute}" if known else "?")
            elif name in IMPORTS_UNSEEN:
                names.append("?")
            pushed = [None, None]
    return names
