"""What `make gpu-stack` does around the installed environment; the environment itself takes minutes."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_environment.environment import Environment, documented_command
from benchmarks.libcuda import NAME, NO_DEVICE, write_libcuda

ROOT = Path(__file__).parents[2]


def test_the_command_is_that_of_the_docs() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert documented_command(page) == "MRL_CUDA=1 pip install -c requirements/gpu.txt '.[gpu]'"
    with pytest.raises(ValueError, match=r"has no `pip install -c requirements/gpu\.txt"):
        documented_command(page.replace("requirements/gpu.txt", "requirements/cpu.txt"))


def test_a_library_that_links_the_driver_can_be_loaded(tmp_path: Path) -> None:
    source = tmp_path / "user.c"
    source.write_text("int cuMemAlloc_v2(void); int start(void) { return cuMemAlloc_v2(); }\n")
    library = tmp_path / "user.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    write_libcuda(tmp_path, [library, source])
    ctypes.CDLL(str(tmp_path / NAME), mode=ctypes.RTLD_GLOBAL)
    assert ctypes.CDLL(str(library)).start() == NO_DEVICE


def test_a_command_that_fails_or_hangs_shows_the_end_of_its_output(tmp_path: Path) -> None:
    environment = Environment(ROOT, tmp_path)
    environment.work.mkdir()
    program = "import sys, time; print('last words', flush=True); time.sleep(float(sys.argv[1]))"
    with pytest.raises(RuntimeError, match=r"last words\nno end after 2 s"):
        environment.run(sys.executable, "-c", program, "60", limit_s=2)
    with pytest.raises(RuntimeError, match=r"last words\nexit code 3"):
        environment.run(sys.executable, "-c", program + "; sys.exit(3)", "0", limit_s=60)
    assert environment.run(sys.executable, "-c", program, "0", limit_s=60) == "last words\n"


def test_a_command_beside_others_is_ended_and_its_end_is_noticed(tmp_path: Path) -> None:
    environment = Environment(ROOT, tmp_path)
    environment.work.mkdir()
    started = tmp_path / "started"
    program = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    with environment.beside(sys.executable, "-c", program) as runs:
        runs.until(started.exists, 60)
    assert runs.process.returncode == -signal.SIGTERM
    with (
        environment.beside(sys.executable, "-c", "print('why'); raise SystemExit(4)") as ends,
        pytest.raises(RuntimeError, match="why\nended with 4"),
    ):
        ends.until(lambda: False, 60)
