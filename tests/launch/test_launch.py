"""The launch scripts and the build files, run for real with stand-ins for the cluster's programs."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mrl.data.arrow import is_hub_id
from mrl.system.releases import newest, numbers
from tests.launch.conftest import torchrun_saw
from tests.release import release
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
TORCHRUN = ROOT / "launch/torchrun.sh"


def test_torchrun_forwards_recipe_and_overrides(cluster):
    environ, seen = cluster
    command = [TORCHRUN, "r.yaml", "reward=my file.py:f", "seed=3"]
    subprocess.run(command, env=environ, check=True)
    words, threads = torchrun_saw(seen)
    tail = ["-m", "mrl", "train", "r.yaml", "reward=my file.py:f", "seed=3"]
    assert words == ["--standalone", "--nproc-per-node", "1", "--max-restarts", "0", *tail]
    assert threads is None  # train.cpu_threads applies


def test_torchrun_counts_gpus_unless_told(cluster):
    environ, seen = cluster
    (seen / "gpus").write_text("GPU 0\nGPU 1\nGPU 2\n")
    subprocess.run([TORCHRUN, "r.yaml"], env=environ, check=True)
    words, threads = torchrun_saw(seen)
    assert (words[2], threads) == ("3", "8")  # 26 cores
    for variables, expected in (
        ({"NPROC": "2"}, ("2", "13")),
        ({"NPROC": "40"}, ("40", "1")),
        ({"OMP_NUM_THREADS": "5"}, ("3", "5")),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ("2", "13")),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("1", "26")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("1", None)),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ("1", None)),
        ({"CUDA_VISIBLE_DEVICES": "2,0,-1,1"}, ("2", "13")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8d-1,GPU-9e-2"}, ("2", "13")),
    ):
        subprocess.run([TORCHRUN, "r.yaml"], env=environ | variables, check=True)
        words, threads = torchrun_saw(seen)
        assert (words[2], threads) == expected


def test_torchrun_checks_once_before_it_starts_ranks(cluster):
    environ, seen = cluster
    environ |= {"NPROC": "2", "CHECK_CODE": "2"}
    run = subprocess.run([TORCHRUN, "r.yaml", "seed=3"], env=environ, check=False)
    assert run.returncode == 2
    assert (seen / "check").read_text() == "2 -m mrl check r.yaml seed=3\n"
    assert not (seen / "torchrun.json").exists()
    subprocess.run([TORCHRUN, "r.yaml"], env=environ | {"IGNORE_MEMORY": "1"}, check=False)
    assert (seen / "check").read_text() == "2 -m mrl check --ignore-memory r.yaml\n"


def test_usage(cluster):
    run = subprocess.run(
        ["bash", TORCHRUN], env=cluster[0], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("usage: ")


def test_make_refuses_an_old_python_in_one_line(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    run = subprocess.run(
        ["make", "setup", f"PYTHON={old}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert f"error: {old} is not Python >= 3.11; run: make PYTHON=python3.11 setup" in run.stderr
    assert not (tmp_path / ".venv").exists()


NOISY = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"pip install"*) for i in $(seq 99); do echo "WARNING: Location $i is ignored" >&2; done
                   case "$*" in *" -e ."*) exit ${KERNELS_FAIL:-0} ;; esac ;;
esac
"""
"""Stands in for Python: pip prints 99 warnings."""


@pytest.mark.parametrize("code", [0, 7])
def test_make_setup_prints_a_line_a_stage_and_what_a_stage_that_fails_printed(
    tmp_path: Path, code: int
) -> None:
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    python = tmp_path / "python3"
    python.write_text(NOISY)
    python.chmod(0o755)
    run = subprocess.run(
        ["make", "setup", f"PYTHON={python}"],
        env={k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        | {"KERNELS_FAIL": str(code)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    stages = [line.partition(" (details: .venv/setup.log)") for line in run.stdout.splitlines()]
    assert [what.split(",")[0] for what, found, _ in stages if found] == [
        *("setup: .venv", "setup: the packages of requirements/cpu.txt"),
        "setup: compiling the kernels",
    ]
    assert len(stages) == 3
    assert (tmp_path / ".venv/setup.log").read_text().count("WARNING") == 198
    if code == 0:
        assert run.stderr == ""
        assert run.returncode == 0
        assert all(re.fullmatch(r" \.\.\. \d+ s", seconds) for _, _, seconds in stages)
    else:
        assert run.returncode == 2
        assert "WARNING: Location 99 is ignored" in run.stderr
        assert run.stderr.count("WARNING") == 40
        assert f"minutes failed with code {code}; see .venv/setup.log for its" in run.stderr
        assert not (tmp_path / ".venv/.installed").exists()


def test_make_help_lists_every_target():
    shown = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = {line.split()[0] for line in shown.stdout.splitlines()}
    assert listed >= {"setup", "demo", "test", "lint", "bench", "clean", "help"}


def locked(name: str, python: str) -> dict[str, str]:
    """Return {package: release} of a lock in requirements/, and of those that it names with -r."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith("-r "):
            more = locked(line.split()[1], python)
        elif line and not line.startswith("#"):
            need = Requirement(line)
            assert re.fullmatch(r"==[0-9][A-Za-z0-9.]*", str(need.specifier)), line
            is_meant = need.marker is None or need.marker.evaluate({"python_version": python})
            package = canonicalize_name(need.name)
            more = {package: str(need.specifier).removeprefix("==")} if is_meant else {}
        else:
            continue
        assert not found.keys() & more.keys(), line
        found |= more
    return found


@pytest.mark.parametrize(
    ("lock", "python", "megatron"),
    [("cpu.txt", "3.11", "0.16.1"), ("cpu-py312.txt", "3.12", "0.19.2")],
)
def test_the_lock_is_exact_and_covers_the_project(lock, python, megatron):
    names = locked(lock, python)
    assert names["megatron-core"] == megatron == newest("megatron-core", numbers(python))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [*project["project"]["dependencies"], *extras["dev"], *extras["tasks"], "sglang",
              *project["build-system"]["requires"]]  # fmt: skip
    wanted = [Requirement(need) for need in needed]
    for need in wanted:
        if need.marker is None or need.marker.evaluate({"python_version": python}):
            assert names[canonicalize_name(need.name)] in need.specifier


def test_the_lock_has_what_this_torch_is_linked_against():
    """pip resolves nothing: a CUDA build, as the index's for 3.12, needs NVIDIA's libraries."""
    lock = "cpu.txt" if sys.version_info < (3, 12) else "cpu-py312.txt"
    pins = locked(lock, platform.python_version())
    for need in map(Requirement, importlib.metadata.requires("torch") or ()):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            parts = {canonicalize_name(need.name)} - {"cuda-toolkit"}  # it has no files of its own
            assert parts <= pins.keys()
            assert all(pins[name] in need.specifier for name in parts)


def test_the_gpu_extra_names_only_what_the_index_has():
    """NVIDIA's apex is not in it: what the package index calls apex is another project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {need.split("[")[0].split(">")[0] for need in (*extras["gpu"], *extras["te"])}
    assert names == {"sglang", "transformer-engine"}


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", release("NOT_UNDER_TORCHRUN")])
def test_a_rank_does_not_outlive_torchrun(variable, tmp_path):
    """The rank waits for its recipe, a pipe; what started it is killed."""
    recipe = tmp_path / "recipe.yaml"
    os.mkfifo(recipe)
    start = (
        "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True);"
        f"time.sleep({LIMIT_S})"
    )
    command = [sys.executable, "-c", start, sys.executable, "-m", "mrl", "train", str(recipe)]
    env = {**os.environ, variable: "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        rank = int(launcher.stdout.readline())
        pipe = os.open(recipe, os.O_WRONLY)  # waits for the rank, and then the rank for us
        launcher.kill()
    dies = variable == "TORCHELASTIC_RUN_ID"
    deadline = time.monotonic() + (LIMIT_S if dies else 0.5)
    while is_alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    survived = is_alive(rank)
    os.close(pipe)
    assert survived != dies


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", ["0", "abc", "-1"])
def test_nproc_is_a_number_above_zero(number):
    env = {**os.environ, "NPROC": number}
    done = subprocess.run(
        [TORCHRUN, "recipe"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"mrl: NPROC: got '{number}', expected a number of processes above 0"
    ]


def test_the_shipped_recipes_need_no_package_that_the_lock_lacks():
    """A data set of the hub is read by `datasets`, parquet by pyarrow."""
    pins = (ROOT / "requirements/cpu.txt").read_text()
    recipes = [yaml.safe_load(f.read_text()) for f in (ROOT / "launch/recipes").glob("*.yaml")]
    paths = [recipe["data"]["path"] for recipe in recipes]
    assert len(paths) > 10
    assert not any(is_hub_id(path) for path in paths) or "\ndatasets==" in pins
    assert not any(path.endswith(".parquet") for path in paths) or "\npyarrow==" in pins
