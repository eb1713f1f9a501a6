"""This module does one core's share of the study, as a child process of `studies.collapse`.

It is the worker of the stability study, with engines whose routers are disturbed as each job says.
"""

from __future__ import annotations

import os
from pathlib import Path

from studies.collapse_study.arms import PLUGIN
from studies.collapse_study.noise import VARIABLE, NoiseFile
from studies.stability_study.worker import Prepare, serve


def disturb(path: Path) -> NoiseFile:
    """Give the engines that this process starts the plug-in; return the file that controls it, at
    `path`. Its scale is 0."""
    noise = NoiseFile.create(path)
    os.environ[VARIABLE] = str(path)
    paths = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return noise


def preparation(folder: Path, cores: str) -> Prepare:
    noise = disturb(folder / f"noise_{cores}")
    return lambda job: noise.set(job.router_noise, job.seed)


if __name__ == "__main__":
    serve("the collapse study", preparation)
