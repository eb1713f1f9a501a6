"""Writes the command that continues a run as it was started: alone, with mrl.launch, or with sbatch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from mrl.run.folder import RunFolder


def train_command(folder: RunFolder, *overrides: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the command that trains the run in `folder` with `overrides`.

    It can be pasted into a shell in the current directory: its paths are as the run was given them.
    """
    run, config = shlex.quote(str(folder.root)), shlex.quote(str(folder.config))
    keys = " ".join(shlex.quote(override) for override in overrides)
    script = folder.root / "train.sbatch"  # which the job copied there
    if "SLURM_JOB_ID" in env and script.exists():
        return f"sbatch {_nodes(env)} {shlex.quote(str(script))} {config} {run} {keys}".rstrip()
    return f"{_program(env)} train {config} {keys}".rstrip()


def _nodes(env: Mapping[str, str]) -> str:
    """Return the options of sbatch for the nodes of a job; of a heterogeneous one for each component,
    the later ones with what the script cannot say for them."""
    if (number := int(env.get("SLURM_HET_SIZE", "1"))) == 1:
        return f"--nodes={env.get('SLURM_JOB_NUM_NODES', '1')}"
    components = []
    for group in range(number):
        nodes = env.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}", "1")
        options = [
            "" if group == 0 else "--exclusive --mem=0 --ntasks-per-node=1 ",
            f"--nodes={nodes}",
        ]
        if partition := env.get(f"SLURM_JOB_PARTITION_HET_GROUP_{group}"):
            options.append(f" --partition={shlex.quote(partition)}")
        components.append("".join(options))
    return " : ".join(components)


def _program(env: Mapping[str, str]) -> str:
    """Return how this program was called, with its launcher."""
    if "WORLD_SIZE" not in env:
        return _alone()
    ranks = env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])
    nodes = int(env.get("GROUP_WORLD_SIZE", max(1, int(env["WORLD_SIZE"]) // int(ranks))))
    where = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-endpoint HOST:PORT"
    return f"python -m mrl.launch {where} --nproc-per-node {ranks} -m mrl"


def _alone() -> str:
    called = Path(sys.argv[0])
    if called.name != "mrl":
        return f"{Path(sys.executable).name} -m mrl"
    found = shutil.which("mrl")
    is_on_path = found is not None and Path(found).resolve() == called.resolve()
    return "mrl" if is_on_path else shlex.quote(os.path.relpath(called))
