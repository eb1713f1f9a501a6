"""What the GPU lane brings to a machine, the compiled extension, and what it takes back: caches."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

from benchmarks.gpu_lane import assemble, caches, extension, unpack
from tests.benchmarks.test_gpu_lane import Lane
from tests.waiting import wait_until

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", 0, -1, 0};
PyMODINIT_FUNC PyInit__C(void) {
  PyObject *made = PyModule_Create(&module);
  PyModule_AddObject(made, "has_cuda", PyBool_FromLong(HAS_CUDA));
  return made;
}
"""


@pytest.fixture
def piece(tmp_path) -> Path:
    """The folder of an extension that is of these sources, and beside it an empty package `mrl`."""
    (tmp_path / "mrl").mkdir()
    (tmp_path / "mrl" / "__init__.py").touch()
    (tmp_path / "torch.py").touch()  # the real one takes seconds, and the extension links none
    folder = tmp_path / "extension"
    folder.mkdir()
    (folder / extension.DIGEST).write_text(extension.source_digest() + "\n")
    return folder


def compile_module(folder: Path, has_cuda: bool) -> None:
    (folder / "module.c").write_text(MODULE)
    include = sysconfig.get_path("include")
    command = ["cc", "-shared", "-fPIC", f"-I{include}", f"-DHAS_CUDA={int(has_cuda)}"]
    subprocess.run([*command, "-o", folder / f"_C{SUFFIX}", folder / "module.c"], check=True)


def test_an_extension_of_these_sources_is_taken(piece) -> None:
    compile_module(piece, has_cuda=True)
    package = piece.parent / "mrl"
    assert extension.take(piece, package) is None
    assert sorted(file.name for file in package.glob("*_C*")) == [f"_C{SUFFIX}"]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("no digest", "there is none among the pieces"),
        ("other digest", "that of the pieces is of other sources"),
        ("other Python", f"that of the pieces is for another Python: it has no _C{SUFFIX}"),
        ("damaged", "that of the pieces does not load: ImportError"),
        ("no kernels", "does not load: AssertionError: it has no GPU kernels"),
    ],
)
def test_an_extension_that_does_not_fit_says_why_and_leaves_nothing(piece, harm, reason) -> None:
    compile_module(piece, has_cuda=harm != "no kernels")
    built = piece / f"_C{SUFFIX}"
    if harm == "no digest":
        (piece / extension.DIGEST).unlink()
    if harm == "other digest":
        (piece / extension.DIGEST).write_text("0" * 64)
    if harm == "other Python":
        built.rename(piece / "_C.cpython-27.so")
    if harm == "damaged":
        built.write_bytes(built.read_bytes()[:100])
    package = piece.parent / "mrl"
    refusal = extension.take(piece, package)
    assert refusal is not None
    assert reason in refusal
    assert not list(package.glob("*_C*"))


def test_the_digest_is_of_what_the_compiler_reads(tmp_path) -> None:
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "setup.py").write_text("A")
    digests = [extension.source_digest(tmp_path)]
    for name in ("mrl.py", "setup.py", "csrc/cuda/a.cu", "csrc/cuda/a.h"):
        (tmp_path / name).write_text("B")
        digests.append(extension.source_digest(tmp_path))
    assert digests[0] == digests[1]
    assert len(set(digests[1:])) == 4


def test_which_python_the_extension_is_compiled_for(tmp_path, monkeypatch) -> None:
    python = tmp_path / "python3.12"
    python.write_text("#!/bin/sh\necho 3 12\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert assemble.find_python(None) == str(python)
    assert assemble.find_python(str(python)) == str(python)
    python.write_text("#!/bin/sh\necho 3 9\n")
    with pytest.raises(SystemExit, match=r"is Python 3\.9; expected a python3\.12"):
        assemble.find_python(str(python))
    python.unlink()
    assert assemble.find_python(None) is None
    with pytest.raises(SystemExit, match=r"No such file or directory; expected a python3\.12"):
        assemble.find_python(str(python))


def test_the_environment_names_the_extension(tmp_path) -> None:
    assert unpack.environment(tmp_path)[unpack.EXTENSION] == str(tmp_path / "extension")


def test_the_toolkit_is_one_that_can_be_linked_against(tmp_path, monkeypatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(unpack, "TOOLKITS", (str(tmp_path / "usual"),))
    for folder in ("wrapper/bin", "usual/bin", "usual/lib64"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("wrapper", "usual"):
        (tmp_path / folder / "bin" / "nvcc").touch()
        (tmp_path / folder / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "wrapper" / "bin"))
    assert unpack.cuda_home() is None
    assert "CUDA_HOME" not in unpack.environment(tmp_path)
    (tmp_path / "usual" / "lib64" / "libcudart.so").touch()
    assert unpack.environment(tmp_path)["CUDA_HOME"] == str(tmp_path / "usual")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "wrapper"))  # lacks the runtime
    assert unpack.cuda_home() == tmp_path / "usual"


@pytest.fixture
def cached(tmp_path) -> Path:
    folder = tmp_path / "caches"
    for name, num_bytes in (("triton/a/k.cubin", 100), ("triton/b/k.cubin", 9000),
                            ("cuda/index", 10), ("tvm_ffi/c/k.so", 500)):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(num_bytes))
        os.utime(folder / name, (1_700_000_000.9, 1_700_000_000.9))
    for name in ("triton/tmp.pid_3/k.cubin", "triton/a/tmp.x", "inductor/d.lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("being written")
    return folder


def test_caches_travel(cached, tmp_path) -> None:
    archive, target = tmp_path / caches.ARCHIVE, tmp_path / "fresh" / "caches"
    target.parent.mkdir()
    packed = caches.pack(cached, archive)
    assert packed == (archive.stat().st_size, [])
    assert f"caches: 4 files, 0.0 MiB, from {archive}" == caches.restore(archive, target)
    found = sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file())
    assert found == ["cuda/index", "triton/a/k.cubin", "triton/b/k.cubin", "tvm_ffi/c/k.so"]
    for name in found:
        assert (target / name).read_bytes() == (cached / name).read_bytes()
        assert (target / name).stat().st_mtime == 1_700_000_000
    (target / "cuda" / "index").write_text("newer")
    assert "are used, of an earlier call" in caches.restore(archive, target)
    assert (target / "cuda" / "index").read_text() == "newer"


def test_the_largest_caches_stay_behind_where_there_is_no_room(
    cached, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(caches, "LIMIT_BYTES", caches.MARGIN_BYTES + 12_000)
    archive = tmp_path / caches.ARCHIVE
    packed = caches.pack(cached, archive)
    assert packed.left_out == ["triton/b"]
    assert archive.stat().st_size <= 12_000
    caches.restore(archive, tmp_path / "out")
    assert not (tmp_path / "out" / "triton" / "b").exists()
    assert (tmp_path / "out" / "triton" / "a").exists()


@pytest.mark.parametrize("harm", ["short", "flipped", "no archive", "empty"])
def test_a_damaged_archive_is_a_warning(cached, tmp_path, harm) -> None:
    archive = tmp_path / caches.ARCHIVE
    caches.pack(cached, archive)
    content = archive.read_bytes()
    middle = len(content) // 2
    archive.write_bytes({
        "short": content[:-100],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:],
        "no archive": gzip.compress(b"no tar"),
        "empty": b"",
    }[harm])  # fmt: skip
    said = caches.restore(archive, tmp_path / "out")
    assert said.startswith(f"warning: {archive} is no archive of caches")
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("out")]


def test_an_archive_is_written_whole_or_not_at_all(cached, tmp_path, monkeypatch, capsys) -> None:
    for name in caches.FOLDERS:
        monkeypatch.setenv(name, "elsewhere")
    kept = caches.Caches(cached, None, tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == str(cached / "triton")
    kept.pack()
    archive = tmp_path / caches.ARCHIVE
    before = archive.read_bytes()
    kept.pack()  # nothing is new
    (cached / "triton" / "e").mkdir()
    (cached / "triton" / "e" / "k").write_text("new")
    monkeypatch.setattr(caches, "_entries", lambda folder: [("triton/a", 9), ("triton/gone", 9)])
    kept.pack()
    assert "warning: the caches were not packed: " in capsys.readouterr().out
    assert archive.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_a_call_that_is_told_to_end_brings_its_caches_back(tmp_path) -> None:
    lane = Lane(tmp_path)
    lane.environment |= {"LANE_PARTS_GPU": str(tmp_path / "gpu"), "LANE_PARTS_LIMIT_S": "600"}
    lane.environment.pop("OMP_NUM_THREADS", None)
    command = lane.command("--device", "cuda", "first", "hangs")
    archive = lane.out / caches.ARCHIVE
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=lane.environment) as call:
        wait_until((tmp_path / "gpu/caches/triton/hangs/kernel.cubin").exists)
        assert archive.exists()  # packed after the first part: SIGKILL would leave it
        call.send_signal(signal.SIGTERM)
    shutil.rmtree(tmp_path / "gpu")  # another machine
    (tmp_path / "gpu").mkdir()
    archive.replace(tmp_path / "gpu" / "carried.tar.gz")
    done = lane.call("--device", "cuda", "--afresh", "first")
    assert "caches: 2 files" in done.stdout, done.stderr  # that of the part which was cut, too
    figures = lane.parts()["first"]["figures"]
    assert figures["was_cached"]
    assert figures["threads"] == str(len(os.sched_getaffinity(0)))
    assert archive.exists()  # it travels on, although nothing is new
