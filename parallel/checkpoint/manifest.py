"""Find checkpoints, check them for damage, and give a complete one its name.

A checkpoint folder `iter_0000010/` has two special files: `manifest.json` lists the size and
SHA-256 of all other files, and `manifest.json.sha256` has the SHA-256 of `manifest.json`. The
second file also contains a SHA-256 of its own first line, so that mrl can tell which of the two is
damaged. This module does not import Megatron.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mrl.errors import InputError
from mrl.system.files import exchange, sync, write_whole

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
DIGEST = "manifest.json.sha256"
FORMAT = 2


class FileRecord(NamedTuple):
    num_bytes: int
    sha256: str


class Damaged(Exception):
    """Raised for a damaged checkpoint. The message names the file and says what is wrong with it."""


def folder_name(step: int) -> str:
    return f"iter_{step:07d}"


def record(file: Path) -> FileRecord:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(file.stat().st_size, digest)


def write_manifest(folder: Path, content: dict[str, Any], files: dict[str, FileRecord]) -> None:
    listed = {n: {"bytes": r.num_bytes, "sha256": r.sha256} for n, r in sorted(files.items())}
    text = json.dumps({"format": FORMAT, **content, "files": listed}, indent=1)
    write_whole(folder / MANIFEST, text, durable=True)
    write_whole(folder / DIGEST, _digest_text(record(folder / MANIFEST).sha256), durable=True)


def _digest_text(digest: str) -> str:
    """Return the text of the digest file. `sha256sum -c` can read it, and skips its second line."""
    line = f"{digest}  {MANIFEST}\n"
    return f"{line}# sha256 of this line: {hashlib.sha256(line.encode()).hexdigest()}\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest, after checking its digest.

    Raises Damaged if the manifest or its digest file is missing or damaged. Raises InputError for a
    checkpoint of a format that this version of mrl does not read.
    """
    manifest, digest = folder / MANIFEST, folder / DIGEST
    try:
        data = manifest.read_bytes()
    except OSError as error:
        raise Damaged(f"{manifest}: {error.strerror}") from None
    try:
        text = digest.read_bytes().decode(errors="replace")
    except OSError as error:
        _refuse_other_format(folder, data)
        raise Damaged(f"{digest}: {error.strerror}") from None
    if text != _digest_text(text[:64]):
        raise Damaged(f"{digest} does not match its own digest")
    if hashlib.sha256(data).hexdigest() != text[:64]:
        raise Damaged(f"{manifest} does not match its SHA-256 in {DIGEST}")
    _refuse_other_format(folder, data)
    return json.loads(data)


def _refuse_other_format(folder: Path, data: bytes) -> None:
    try:
        found = json.loads(data)["format"]
    except (ValueError, KeyError, TypeError):
        return
    if found != FORMAT:
        raise InputError(
            f"checkpoint {folder} has format {found}, this version of mrl reads format {FORMAT}; "
            "continue with the version that wrote it, or start in another output_dir"
        )


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise Damaged if a file is missing or has the wrong size. This is cheap: it reads no contents."""
    for name, listed in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise Damaged(f"{file} is missing")
        if file.stat().st_size != listed["bytes"]:
            raise Damaged(
                f"{file} has {file.stat().st_size} bytes, {MANIFEST} says {listed['bytes']}"
            )


def check_digests(folder: Path, manifest: dict[str, Any], rank: int = 0, world: int = 1) -> None:
    """Raise Damaged if a file does not match its SHA-256. Each of `world` ranks checks a part of
    the files."""
    by_size = sorted(manifest["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    for name, listed in by_size[rank::world]:
        if record(folder / name).sha256 != listed["sha256"]:
            raise Damaged(f"{folder / name} does not match its SHA-256 in {MANIFEST}")


def damage(folder: Path, *, digests: bool = True, rank: int = 0, world: int = 1) -> str | None:
    """Return a message that says which file of a checkpoint is damaged and how; None if none is.

    Without `digests` the manifest and the sizes of all files are checked, but not the contents of
    the files. With several ranks (`world`) each rank checks the contents of a part of the files.
    Raises InputError for a checkpoint of a format that this version of mrl does not read.
    """
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
        if digests:
            check_digests(folder, manifest, rank, world)
    except Damaged as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def candidates(root: Path) -> list[Path]:
    """Return the folder of the checkpoint that the file LATEST names, then the folders of all older
    checkpoints, newest first.

    If LATEST is missing or holds no number, return the folders of all checkpoints.
    """
    found = set(steps(root))
    latest = latest_step(root)
    if latest is not None:
        found = {step for step in found if step <= latest} | {latest}
    return [root / folder_name(step) for step in sorted(found, reverse=True)]


def steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in `root`, sorted. Folders whose names are not those of
    checkpoints belong to the user and are ignored."""
    names = [f.name for f in root.glob("iter_*") if f.is_dir()]
    numbers = [name.removeprefix("iter_") for name in names]
    found = [int(number) for number in numbers if number.isascii() and number.isdigit()]
    return sorted(step for step in found if folder_name(step) in names)


def latest_step(root: Path) -> int | None:
    """Return the step that the file LATEST names; None if there is no such file or it holds no
    number."""
    try:
        text = (root / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def newest_good(
    folders: list[Path], find_damage: Callable[[Path], str | None], warn: Callable[[str], None]
) -> Path | None:
    """Return the first folder without damage; None if there are no folders.

    Damaged folders before it are reported. Raises InputError if all folders are damaged.
    """
    reasons = []
    for folder in folders:
        reason = find_damage(folder)
        if reason is None:
            return folder
        reasons.append(reason)
        state = "is damaged" if folder.is_dir() else f"is not there, though {LATEST} names it"
        warn(f"checkpoint {folder.name} {state}, and left out: {reason}")
    if not folders:
        return None
    raise InputError(
        f"{folders[0].parent}: none of {len(folders)} checkpoint(s) is whole ({'; '.join(reasons)}); "
        "bring one back from a copy, or start in another output_dir"
    )


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def partial_folder(root: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return root / f".{folder_name(step)}.partial"


def publish(root: Path, step: int, keep: int) -> Path:
    """Give the complete checkpoint of `step` its name, and write `step` to the file LATEST. Keep the
    newest `keep` checkpoints up to `step`, and remove older ones. Return the checkpoint's folder."""
    final, partial = root / folder_name(step), partial_folder(root, step)
    replaced = root / f".{final.name}.replaced"
    sync(partial)
    shutil.rmtree(replaced, ignore_errors=True)
    # There is a checkpoint of this step if the run was set back, or if a name is used again. Where the
    # two cannot be exchanged, a crash between the renames leaves neither under the name (`restore`).
    if not (final.exists() and exchange(partial, final)):
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
    point_to(root, step)
    # Later checkpoints of a run that was set back are kept. Interrupted saves leave hidden folders.
    upto = [number for number in steps(root) if number <= step]
    for old in (folder_name(number) for number in upto[:-keep]):
        (root / old).rename(
            root / f".{old}.removed"
        )  # a half-removed folder must not have its name
    sweep(root)
    return final


def restore(root: Path) -> None:
    """Give a checkpoint its name back if a crash came between the two renames with which another one of
    its step was to replace it. No save may be in progress."""
    for hidden in root.glob(".iter_*.replaced"):
        final = root / hidden.stem.removeprefix(".")
        if not final.exists():
            hidden.rename(final)


def sweep(root: Path) -> None:
    """Remove the hidden folders that interrupted saves have left. No save may be in progress."""
    restore(root)
    for hidden in root.glob(".iter_*"):
        if hidden.suffix in (".partial", ".replaced", ".removed"):
            shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def staying(folder: Path) -> Iterator[None]:
    """Say so, in place of the `with` block's error, if the checkpoint `folder` was removed meanwhile,
    as a running job removes its older checkpoints. Raises InputError."""
    try:
        yield
    except Exception:
        if folder.is_dir():
            raise
        raise InputError(
            f"{folder} was removed meanwhile: a run keeps its newest checkpoint.keep checkpoints; "
            "give the command again"
        ) from None


def point_to(root: Path, step: int) -> None:
    """Write `step` to the file LATEST, so that the next start resumes from that checkpoint."""
    write_whole(root / LATEST, f"{step}\n", durable=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to `iter_0000010.damaged` or similar; return the new path."""
    names = (f"{folder.name}.damaged{'' if n == 1 else f'.{n}'}" for n in itertools.count(1))
    aside = next(path for name in names if not (path := folder.with_name(name)).exists())
    return folder.rename(aside)
