"""The real loop on the toy model: one recorded run that several tests read."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.jobs.train import train
from mrl.toy_model import write_toy_model
from parallel.hf_config import HfModel
from parallel.lora.rules import adapter_shapes, read_adapter
from parallel.mesh import world_size
from tests.loop.forked import Command
from tests.ranks import run_ranks

REPOSITORY = Path(__file__).parents[2]
TOY_RECIPE = REPOSITORY / "launch/recipes/toy_moe.yaml"
COMMAND_TIMEOUT_S = 240


@dataclass(frozen=True)
class Toy:
    """A toy model and the command line that trains it fast."""

    model: Path

    def overrides(self, output: Path, *more: str) -> list[str]:
        return [
            f"model.path={self.model}",
            f"output_dir={output}",
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            "rollout.max_response_len=12",
            "rollout.min_response_len=0",
            "train.micro_batch_tokens=160",
            "optimizer.lr=3e-3",
            *more,
        ]

    def start(
        self, output: Path, *more: str, env: Mapping[str, str], recipe: Path = TOY_RECIPE
    ) -> Command:
        """`mrl train` as a fork of this process; what it prints goes beside the run folder."""
        arguments = ["train", str(recipe), *self.overrides(output, *more)]
        return Command(arguments, env, output.with_name(f"{output.name}.printed"))

    def run(
        self, output: Path, *more: str, recipe: Path = TOY_RECIPE, **env: str
    ) -> subprocess.CompletedProcess[str]:
        command = self.start(output, *more, env=environment(**env), recipe=recipe)
        return command.finish(COMMAND_TIMEOUT_S)

    def told_to_leave(
        self, output: Path, *more: str, env: dict[str, str], number: int = signal.SIGUSR1
    ) -> tuple[int, str]:
        """Start, send the signal after the first step -> exit code and stderr."""
        command = self.start(output, *more, env=env)
        deadline = time.monotonic() + 180
        while not (output / "metrics.jsonl").exists():
            assert command.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        command.send_signal(number)
        done = command.finish(COMMAND_TIMEOUT_S)
        return done.returncode, done.stderr


def environment(**more: str) -> dict[str, str]:
    """Scripts find the Python of the tests first: there may be another in `.venv`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def trained(overrides: list[str], recipe: Path = TOY_RECIPE) -> None:
    """`mrl train` on this rank, less the imports of a new process."""
    train(load_recipe(recipe, overrides), world_size())


@pytest.fixture(scope="session")
def toy(made_once: Callable[..., Path]) -> Toy:
    """One folder for all workers: the path is in the recipe of the recorded run."""
    return Toy(made_once("toy", write_toy_model))


RECORDED = ("train.num_steps=4", "debug.save_rollouts=true", "checkpoint.save_every=2")


@pytest.fixture(scope="session")
def recorded(toy: Toy, made_once: Callable[..., Path]) -> Path:
    """The run folder of four steps with everything saved. It is not to be changed."""

    def record(folder: Path) -> None:
        overrides = toy.overrides(folder / "run", *RECORDED)
        run_ranks(1, trained, overrides, folder=folder / "out")

    return made_once("recorded", record) / "run"


def adapter_bytes(toy: Toy, output: Path) -> int:
    """Return the bytes, in fp32, of the adapter that the run of a folder trains."""
    model, recipe = HfModel.read(toy.model), load_recipe(output / "config.yaml")
    assert recipe.lora is not None
    shapes = adapter_shapes(model, read_adapter(recipe.lora, model))
    return 4 * sum(math.prod(shape) for shape in shapes.values())
