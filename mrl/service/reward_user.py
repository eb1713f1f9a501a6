"""Protects the service from the rewards and environments of tenants, by running them as another
user."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

from mrl.errors import InputError
from mrl.rewards.worker_calls import reward_worker
from mrl.run import console
from mrl.system.worker_user import worker_user

TRIAL = "first_char"
"""Name of the built-in reward that is started once, to check that the other user can run rewards."""


def prepare_reward_user(name: str | None, *, is_main: bool) -> None:
    """Prepare this process for running rewards as the user `name` (tenants.reward_user).

    If that is not the user of this process, files that this process creates from now on are closed
    to other users. The main rank also starts a reward as that user, and raises InputError if the
    reward cannot run. If `name` is None and this process runs as root, the main rank only warns.
    """
    user = worker_user(name)
    if user is None:
        if name is None and is_main and os.geteuid() == 0:
            console.warning(
                "the rewards and environments of tenants run as root, and may read and change "
                "everything; set tenants.reward_user to another user, or to root to agree"
            )
        return
    os.umask(0o077)
    if not is_main:
        return
    try:
        with closing(reward_worker(TRIAL, 30.0, user)) as worker:
            worker.start()
    except InputError as error:
        raise InputError(
            f"tenants.reward_user is {name}, who cannot run a reward: {error}; that user has to read "
            f"Python ({sys.executable}) and mrl ({Path(__file__).parents[2]})"
        ) from None


def close_folder(folder: Path, name: str | None) -> None:
    """If rewards run as another user, make a folder of the service accessible to its owner only."""
    if worker_user(name) is not None:
        folder.chmod(0o700)


def warn_of_open_folder(folder: Path, name: str | None) -> None:
    """Warn if rewards run as another user and the run folder is accessible to users other than its
    owner. It can be accessible to them if it existed before the run."""
    if worker_user(name) is not None and folder.stat().st_mode & 0o077:
        console.warning(
            f"output_dir {folder} was there before and is open to other users, also to the rewards of "
            f"all tenants; close it: chmod 700 {folder}"
        )
