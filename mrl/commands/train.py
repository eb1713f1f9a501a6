"""`mrl train RECIPE [key=value ...]` trains, also under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mrl.commands.launcher import train_command
from mrl.commands.recipe_arguments import add_allow, add_recipe, read_recipe
from mrl.commands.report import note_saved, reporting
from mrl.config import Recipe
from mrl.errors import ExitCode
from mrl.run.callbacks import Callback
from mrl.run.folder import RunFolder
from mrl.system.memory_error import noting_bytes
from mrl.system.processes import die_with_torchrun
from mrl.system.stop import remember_signals, remembering_signals

if TYPE_CHECKING:
    from mrl.preflight import Plan
    from mrl.preflight.roles import Roles


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train a recipe; continues an interrupted run",
        description="Train a recipe. A run that was interrupted continues from its newest checkpoint "
        "in output_dir, also where RECIPE is its folder; docs/checkpoints.md says what may change. "
        "On several GPUs: python -m mrl.launch --nproc-per-node N -m mrl train RECIPE.",
    )
    add_recipe(command)
    add_allow(command)
    command.set_defaults(
        run=run, after_interrupt="start again to continue from the last checkpoint"
    )


def run(args: argparse.Namespace) -> None:
    die_with_torchrun()
    remember_signals()
    recipe = read_recipe(args)
    from parallel.mesh import destroy_mesh, world_size

    stopped = train(recipe, world_size(), allowed=args.allow)
    destroy_mesh()
    if stopped:
        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: {stopped}", file=sys.stderr)
            note_saved()
        sys.exit(ExitCode.SAVED)


@remembering_signals()  # SIGUSR1 while the model loads and the engine starts
def train(
    recipe: Recipe,
    world: int,
    callbacks: Sequence[Callback] = (),
    allowed: Sequence[str] = (),
) -> str:
    """Check, start and run a recipe on this rank of `world`.

    `allowed`: keys that may change in a run that is continued (`--allow`). Returns why the run stopped
    before its last step; empty where it is done.
    """
    from mrl.commands.ranks import check_ranks
    from mrl.preflight import check
    from mrl.preflight.roles import roles_of
    from mrl.preflight.room import check_room
    from mrl.run import console
    from parallel.connections import set_connections

    check_ranks(recipe, world, "train")
    roles, rank = roles_of(recipe, world), int(os.environ.get("RANK", "0"))
    if roles.is_rollout(rank):
        return _roll_out(recipe, roles, rank, allowed)
    set_connections(recipe.parallel)
    is_main = os.environ.get("RANK", "0") == "0"
    with closing(RunFolder(recipe.output_dir)) as folder:
        room = ""
        if is_main:
            folder.claim()  # before the check looks for a checkpoint
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
            print(
                f"{folder.root} is done: {steps}, by the sizes of the files (mrl export reads every "
                "byte)"
            )
        return ""


def _roll_out(recipe: Recipe, roles: Roles, rank: int, allowed: Sequence[str]) -> str:
    """Lead engines, or give them this rank's device, until the trainers are done."""
    from mrl.disaggregated.supervisor import job_of_run, supervise
    from mrl.watch.start import watched_engine_rank
    from parallel.mesh import join_store

    store = join_store()[0]
    with watched_engine_rank(recipe.watch, store, rank) as look:
        if code := supervise(job_of_run(recipe, allowed), roles, rank, store, look):
            sys.exit(code)
    return ""


def _train(plan: Plan, folder: RunFolder, callbacks: Sequence[Callback]) -> str:
    from parallel import prepare

    prepare()
    import torch.distributed as dist

    from mrl.commands.bytes_held import bytes_held
    from mrl.commands.out_of_memory import memory_advice
    from mrl.run import console
    from mrl.trainer import Trainer
    from mrl.watch.start import EngineRanks, least_limits, watching
    from parallel.clocks import compare_clocks
    from parallel.mesh import init_mesh, join_store

    made: list[Trainer] = []
    recipe, command = plan.recipe, train_command(folder)
    with reporting(
        folder.root,
        command,
        lambda error: memory_advice(error, recipe, folder),
        lambda: made[0].step if made else None,
    ):
        mesh = init_mesh(plan.dims, recipe.seed, timeout_s=recipe.longest_wait_s)
        found = [plan.checkpoint_step]  # as rank 0 saw it, which has claimed the folder
        dist.broadcast_object_list(found)
        plan = replace(plan, checkpoint_step=found[0])
        if (apart := compare_clocks()) and mesh.rank == 0:
            console.warning(apart)
        rest = range(plan.roles.num_trainers, plan.roles.world)  # they lead engines
        engine_ranks = EngineRanks(join_store()[0], rest, recipe.longest_wait_s) if rest else None
        with (
            watching(recipe.watch, least_limits(recipe), folder.root, command, engine_ranks),
            closing(Trainer(plan, mesh, folder, callbacks)) as trainer,
        ):
            made.append(trainer)
            with noting_bytes(lambda: bytes_held(trainer)):
                trainer.train()
            return trainer.stopped


def _is_done(plan: Plan, folder: RunFolder) -> bool:
    """All steps, and the evaluation of the final weights where there is to be one."""
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
