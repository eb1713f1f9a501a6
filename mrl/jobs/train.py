"""Trains a recipe on this rank, from the checks of the recipe to the summary of the run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from mrl.config import Recipe
from mrl.config.watch import WatchConfig
from mrl.jobs.report import reporting
from mrl.jobs.restart_command import train_command
from mrl.run.callbacks import Callback
from mrl.run.folder import RunFolder
from mrl.system.imports import importing
from mrl.system.memory_error import noting_bytes
from mrl.system.stop import remembering_signals

if TYPE_CHECKING:
    from mrl.engine_pool.remote.supervisor import Job
    from mrl.preflight import Plan
    from mrl.preflight.roles import Roles


@remembering_signals()  # SIGUSR1 while the model loads and the engine starts
def train(
    recipe: Recipe,
    world: int,
    callbacks: Sequence[Callback] = (),
    allowed: Sequence[str] = (),
) -> str:
    """Check a recipe and train it on this rank.

    `world` is the number of ranks. `allowed` are the keys that may change when a run is continued
    (`--allow`). Returns the reason why the run stopped before its last step, or an empty string if
    all steps are done. On a rollout rank of a disaggregated run, the result is always empty.
    """
    with importing():
        from mrl.preflight import check
        from mrl.preflight.ranks import check_ranks
        from mrl.preflight.roles import roles_of
        from mrl.preflight.room import check_room
        from mrl.run import console
        from parallel.connections import set_connections

    check_ranks(recipe, world, "train")
    roles, rank = roles_of(recipe, world), int(os.environ.get("RANK", "0"))
    if roles.is_rollout(rank):
        from mrl.engine_pool.remote.supervisor import job_of_run

        roll_out(job_of_run(recipe, allowed), recipe.watch, roles, rank)
        return ""
    set_connections(recipe.parallel)
    is_main = rank == 0
    with closing(RunFolder(recipe.output_dir)) as folder:
        room = ""
        if is_main:
            folder.claim()  # must precede the check, which looks for a checkpoint
        plan = check(recipe, world, allowed=allowed)
        recipe = plan.recipe
        if is_main:
            room = "" if _is_done(plan, folder) else check_room(plan, console.warning)
            folder.open(recipe, plan.update, plan.resume_step or 0)
        with reporting(folder.root, train_command(folder), lambda error: None, lambda: None):
            if is_main:
                console.pairs([*plan.rows(), *([("disk", room)] if room else [])])
            if not _is_done(plan, folder):
                stopped = _train(plan, folder, callbacks)
                if is_main and not stopped:
                    _summarize(folder, recipe)
                return stopped
        if is_main:
            done, wanted = plan.resume_step or 0, recipe.train.num_steps
            steps = (
                f"{done} of {wanted} steps" if done == wanted else f"{done} steps, {wanted} wanted"
            )
            more = (
                f"mrl train {shlex.quote(str(folder.root))} train.num_steps={2 * max(done, wanted)}"
            )
            print(
                f"{folder.root} is done: {steps}, by the sizes of the files (mrl export reads every "
                f"byte); to train on: {more}"
            )
        return ""


def roll_out(job: Job, watch: WatchConfig, roles: Roles, rank: int) -> None:
    """Run this rollout rank until the trainer ranks are done.

    The first rank of each engine starts and supervises the engine's server; the other ranks only let
    the server use their GPUs. Exits the process if the supervision ends with an error code.
    """
    from mrl.engine_pool.remote.supervisor import supervise
    from mrl.watch.start import watched_engine_rank
    from parallel.mesh import join_store

    store = join_store()[0]
    with watched_engine_rank(watch, store, rank) as look:
        if code := supervise(job, roles, rank, store, look):
            sys.exit(code)


def _train(plan: Plan, folder: RunFolder, callbacks: Sequence[Callback]) -> str:
    with importing():
        from parallel import prepare

        prepare()
        import torch
        import torch.distributed as dist

        from mrl.jobs.bytes_held import bytes_held
        from mrl.jobs.out_of_memory import memory_advice
        from mrl.run import console
        from mrl.trainer import Trainer
        from mrl.watch.start import EngineRanks, least_limits, watching
        from parallel.mesh import compare_clocks, init_mesh, join_store

    made: list[Trainer] = []
    recipe, command = plan.recipe, train_command(folder)
    with reporting(
        folder.root,
        command,
        lambda error: memory_advice(error, recipe, folder),
        lambda: made[0].step if made else None,
    ):
        mesh = init_mesh(plan.dims, recipe.seed, timeout_s=recipe.longest_wait_s)
        if mesh.device.type == "cpu":
            torch.set_num_threads(plan.threads.number)
        # All ranks use the step of rank 0, which has claimed the folder.
        found = [plan.checkpoint_step]
        dist.broadcast_object_list(found)
        plan = replace(plan, checkpoint_step=found[0])
        if (clock_warning := compare_clocks()) and mesh.rank == 0:
            console.warning(clock_warning)
        rollout_ranks = range(plan.roles.num_trainers, plan.roles.world)
        engine_ranks = None
        if rollout_ranks:
            engine_ranks = EngineRanks(join_store()[0], rollout_ranks, recipe.longest_wait_s)
        with (
            watching(recipe.watch, least_limits(recipe), folder.root, command, engine_ranks),
            closing(Trainer(plan, mesh, folder, callbacks)) as trainer,
        ):
            made.append(trainer)
            with noting_bytes(lambda: bytes_held(trainer)):
                trainer.train()
            return trainer.stopped


def _is_done(plan: Plan, folder: RunFolder) -> bool:
    """Return whether all steps of the run are done.

    If the recipe evaluates during training, the evaluation after the last step must be done, too.
    """
    step, recipe = plan.resume_step, plan.recipe
    if step is None or step < recipe.train.num_steps:
        return False
    return not recipe.eval.every or folder.evaluation_file(step).exists()


def _summarize(folder: RunFolder, recipe: Recipe) -> None:
    from mrl.run import console

    rows = folder.read_metrics()
    rewards = [row["reward/mean"] for row in rows]
    scored = [r for r in folder.read_rollouts(rows[-1]["step"]) if r["reward"] is not None]
    by_reward = sorted(scored, key=lambda row: row["reward"])
    console.summary(
        [float("nan") if reward is None else reward for reward in rewards],
        by_reward[-1] if scored else {},
        by_reward[0] if scored else {},
        folder.root,
        train_command(folder, f"train.num_steps={2 * recipe.train.num_steps}"),
    )
