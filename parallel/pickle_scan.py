"""What a pickle would import, found without running it.

torch's `.metadata` is a pickle, and unpickling runs whatever the file names. A checkpoint may come
from anywhere and its digests prove only that it is whole, so that every pickle in it is read opcode by
opcode first, and refused unless all it names are the plain records of torch's checkpoint format.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

from mrl.errors import InputError

RECORDS = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset(
    {
        *(f"{RECORDS}.{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties",
          "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(f"torch.{name}" for name in ("Size", "float64", "float32", "float16", "bfloat16", "uint8",
          "int64", "int32", "int16", "int8", "bool", "strided")),
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "collections.defaultdict",
        "pathlib.PosixPath",
    }
)  # fmt: skip
IMPORTS_BY_NAME = ("GLOBAL", "INST")
IMPORTS_UNSEEN = ("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID")
NEUTRAL = ("PROTO", "FRAME")
TEXT = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")


def check_pickles(folder: Path) -> None:
    """Raise InputError where a pickle of a checkpoint would import anything outside the list."""
    try:
        with zipfile.ZipFile(folder / "common.pt") as archive:
            pickles = {
                f"common.pt/{name}": archive.read(name)
                for name in archive.namelist()
                if name.endswith(".pkl")
            }
        pickles[".metadata"] = (folder / ".metadata").read_bytes()
    except (OSError, zipfile.BadZipFile) as error:
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


def imported(data: bytes) -> list[str]:
    """Dotted names that unpickling `data` would import. Raises ValueError on broken data.

    A name taken from the stack counts as known only when the two opcodes before it pushed constants;
    in every other case it is reported as `?`, which no list allows.
    """
    names: list[str] = []
    pushed: list[Any] = [None, None]  # the last two values, None where it is not a known text
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
