"""Archives that torch.load reads in another way than a zip reader: refused before it sees them."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mrl.errors import InputError
from parallel.checkpoint.pickle_scan import archived_pickle, check_pickles

STATE = {"adam_step": 1, "seed": 7}


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.trace,)


def entries(file: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def archive(content: list[tuple[str, bytes]], before: bytes = b"") -> bytes:
    stream = io.BytesIO(before)
    with zipfile.ZipFile(stream, "a") as out:
        for name, data in content:
            out.writestr(name, data)
    return stream.getvalue()


def other_case(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    """torch's reader finds data.PKL where it asks for data.pkl."""
    rest = [(name, data) for name, data in honest if not name.endswith(".pkl")]
    return archive([*rest, ("common/data.PKL", planted)])


def both_cases(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    return archive([("common/DATA.pkl", planted), *honest])


def twice(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    return archive([("common/data.pkl", planted), *honest])


def two_roots(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    return archive([("other/data.pkl", planted), *honest])


def torchscript(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    return archive([*honest, ("common/constants.pkl", planted)])


def in_front(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    """torch.load reads a file that does not begin as an archive from its first byte on, in the
    format before archives; a zip reader looks from the end, and finds the honest archive."""
    return planted + good


def in_front_with_places(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    """Like the one above; the archive also says where it is, so that torch's reader finds it."""
    return archive(honest, planted)


def two_directories(good: bytes, honest: list[tuple[str, bytes]], planted: bytes) -> bytes:
    """torch takes the directory of an archive from where the last record says that it is, Python from
    right before that record."""
    bad = archive([(n, planted if n.endswith(".pkl") else data) for n, data in honest])
    whole = bad + good
    size, place = struct.unpack("<LL", bad[-10:-2])
    return whole[:-10] + struct.pack("<LL", size, place) + whole[-2:]


FORGERIES = [
    other_case, both_cases, twice, two_roots, torchscript, in_front, in_front_with_places,
    two_directories,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_archive_is_refused_unopened(
    forge: Callable[[bytes, list[tuple[str, bytes]], bytes], bytes], tmp_path: Path
) -> None:
    file, trace = tmp_path / "common.pt", tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    torch.save(STATE, file)
    check_pickles(tmp_path)
    planted = pickle.dumps(Planted(trace), 2)
    file.write_bytes(forge(file.read_bytes(), entries(file), planted))
    with pytest.raises(InputError, match=r"common\.pt") as caught:
        check_pickles(tmp_path)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


def test_what_torch_writes_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "common.pt"
    torch.save(STATE, file)
    honest = dict(entries(file))
    assert archived_pickle(file) == honest["common/data.pkl"]
    file.write_bytes(archive(list(honest.items())))  # by another writer, the same content
    assert archived_pickle(file) == honest["common/data.pkl"]
