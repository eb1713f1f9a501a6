"""Builds the command that continues a run or a service the way it was started.

A run or a service is started as a single process, with `mrl.launch`, or with sbatch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from mrl.run.failure import SERVICE_FILE
from mrl.run.folder import RunFolder


def train_command(folder: RunFolder, *overrides: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the command that trains the run in `folder` with `overrides`.

    The command can be pasted into a shell in the current directory, because paths are written as
    the user gave them.
    """
    keys = " ".join(shlex.quote(override) for override in overrides)
    return f"{_command('train', folder.root, folder.config, env)} {keys}".rstrip()


def serve_command(folder: Path, env: Mapping[str, str] = os.environ) -> str:
    """Return the command that starts the service in `folder` again.

    The command can be pasted into a shell in the current directory.
    """
    return _command("serve", folder, folder / SERVICE_FILE, env)


def _command(name: str, root: Path, config: Path, env: Mapping[str, str]) -> str:
    run, file = shlex.quote(str(root)), shlex.quote(str(config))
    script = root / "train.sbatch"  # the SLURM job copies its script there
    if "SLURM_JOB_ID" not in env or not script.exists():
        return f"{_program(env)} {name} {file}"
    is_service = "SERVE=1 " if name == "serve" else ""
    return f"{is_service}sbatch {_nodes(env)} {shlex.quote(str(script))} {file} {run}"


def _nodes(env: Mapping[str, str]) -> str:
    """Return sbatch's options for the nodes of the current job.

    A heterogeneous job has options for each component. The components after the first also need the
    options that the batch script sets only for the first component.
    """
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
    """Return the command that started this program, including its launcher if it has one."""
    if "WORLD_SIZE" not in env:
        return _alone()
    ranks = env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])
    nodes = int(env.get("GROUP_WORLD_SIZE", max(1, int(env["WORLD_SIZE"]) // int(ranks))))
    where = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-endpoint HOST:PORT"
    return f"python -m mrl.launch {where} --nproc-per-node {ranks} -m mrl"


def _alone() -> str:
    """Return the command that starts this program without a launcher.

    It is `mrl`, with a path if `mrl` is not on the PATH, or `python -m mrl` if that was used.
    """
    called = Path(sys.argv[0])
    if called.name != "mrl":
        return f"{Path(sys.executable).name} -m mrl"
    found = shutil.which("mrl")
    is_on_path = found is not None and Path(found).resolve() == called.resolve()
    return "mrl" if is_on_path else shlex.quote(os.path.relpath(called))
