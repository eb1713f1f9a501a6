"""Digests of the files that a recipe names, which show whether two paths hold the same contents.

Files of up to 64 MiB are read completely. For a larger file, the digest covers its size and 64
pieces of 64 KiB spread evenly over it, so that a start need not read terabytes of weights.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config import Recipe
from mrl.config.paths import FORMS, REWARD_MODEL
from mrl.run.changes import flatten, rule_of

WHOLE_BYTES = 64 << 20
NUM_PIECES, PIECE_BYTES = 64, 64 << 10


def contents_of(recipe: Recipe) -> dict[str, str]:
    """Return, by recipe key, a digest of the files that the key's value names.

    The result has only keys whose value is not null and for which a restart compares the contents
    of the files, not only their paths (`Rule.by_contents`).
    """
    flat = flatten(recipe.model_dump())
    return {
        key: digest_of(value)
        for key, value in flat.items()
        if value is not None and rule_of(key).by_contents
    }


def digest_of(value: Any) -> str:
    """Return the digest of a value from a recipe.

    For files and folders that the value names, the digest covers the contents instead of the paths.
    """
    text = json.dumps(_resolved(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _resolved(value: Any) -> Any:
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, Mapping):
        return {name: _resolved(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolved(part) for part in value]
    return value


def _of_text(text: str) -> Any:
    """Return the digests of the files that `text` names as a path, a glob or `file.py:NAME`.

    `text` may have a prefix such as `verl:`. If `text` names no file, the result is `text` itself.
    Relative paths are not looked up, because paths in a recipe are absolute (`mrl.config.paths`).
    """
    for form in (*FORMS, REWARD_MODEL):
        if text.startswith(form):
            return [form, _of_text(text.removeprefix(form))]
    if not os.path.isabs(text):
        return text
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py") and Path(file).is_file():
        return [_of_file(Path(file)), name]
    path = Path(text)
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return {str(each.relative_to(path)): _of_file(each) for each in _files_in(path)}
    found = sorted(glob.glob(text)) if glob.has_magic(text) else []
    return [_of_file(Path(each)) for each in found if Path(each).is_file()] or text


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a model or data set, without hidden files and Markdown."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and path.suffix != ".md" and not any(p.startswith(".") for p in parts):
            yield path


def _of_file(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        sha = hashlib.sha256(str(size).encode())
        for piece in range(NUM_PIECES):
            stream.seek((size - PIECE_BYTES) * piece // (NUM_PIECES - 1))
            sha.update(stream.read(PIECE_BYTES))
    return sha.hexdigest()
