"""CUDA_DEVICE_MAX_CONNECTIONS: which layouts and GPUs get it, set before torch starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config import ParallelConfig
from parallel import connections
from parallel.connections import choose_connections, set_connections
from tests.release import release

ALONE = ParallelConfig(expert_model_parallel_size=8)
TENSOR = ParallelConfig(tensor_model_parallel_size=2)
CONTEXT = ParallelConfig(context_parallel_size=2)
HOPPER = "9.0\n9.0\n"


@pytest.mark.parametrize("layout", [TENSOR, CONTEXT])
@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (HOPPER, "1"),
        ("8.0\n", "1"),
        ("10.0\n10.0\n", None),
        ("12.0\n", None),
        ("9.0\n10.0\n", "1"),
        ("", None),
        ("[N/A]\n", None),
    ],
)
def test_one_queue_before_blackwell(layout: ParallelConfig, answer: str, value: str | None) -> None:
    assert choose_connections(layout, lambda: answer) == value


def test_layouts_that_overlap_nothing_ask_nothing() -> None:
    assert choose_connections(ALONE, lambda: pytest.fail("asked")) is None


def test_a_value_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool here is a script that answers as it does on a node of Hopper GPUs."""
    tool = tmp_path / connections.QUERY[0]
    tool.write_text(f"#!/bin/sh\n[ \"$*\" = '{' '.join(connections.QUERY[1:])}' ] && echo 9.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for given, expected in ((None, "1"), ("32", "32")):
        monkeypatch.delenv(connections.VARIABLE, raising=False)
        if given:
            monkeypatch.setenv(connections.VARIABLE, given)
        set_connections(TENSOR)
        assert os.environ[connections.VARIABLE] == expected
    tool.write_text("#!/bin/sh\nexit 9\n")
    monkeypatch.delenv(connections.VARIABLE)
    set_connections(TENSOR)
    monkeypatch.setattr(connections, "DRIVER", tmp_path)  # here is a GPU, then
    with pytest.warns(RuntimeWarning, match="nvidia-smi did not report .* set it to 1 on GPUs"):
        set_connections(TENSOR)
    assert connections.VARIABLE not in os.environ


@pytest.mark.parametrize("command", ["train", release("serve")])
def test_it_is_set_before_torch_asks_for_gpus(command: str, tmp_path: Path) -> None:
    """The command ends at the first question to CUDA, and says what the environment was."""
    program = f"""
import os, sys, torch
def asked(*_, **__):
    print("asked", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    sys.stdout.flush()
    os._exit(0)
torch.cuda.is_available = torch.cuda.device_count = asked
from parallel import connections
connections._ask = lambda: "9.0"
from mrl.config import ParallelConfig, ServiceConfig
if {command!r} == "train":
    from mrl.jobs.train import train
    from mrl.config.load import load_recipe
    keys = ["parallel.tensor_model_parallel_size=2", "output_dir={tmp_path}"]
    train(load_recipe("launch/recipes/toy_moe.yaml", keys), 2)
else:
    from mrl.commands.serve import serve
    layout = ParallelConfig(tensor_model_parallel_size=2)
    serve(ServiceConfig.model_construct(parallel=layout), 2)
"""
    environment = {k: v for k, v in os.environ.items() if k != connections.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment | {"RANK": "0", "WORLD_SIZE": "2"},
    )
    assert done.stdout.strip() == "asked 1", done.stdout + done.stderr
