"""`mrl eval RECIPE [key=value ...]` evaluates a checkpoint or a model, also under torchrun."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.commands.recipe_arguments import add_recipe, read_recipe
from mrl.config import Recipe
from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.system.processes import die_with_torchrun

if TYPE_CHECKING:
    from mrl.preflight import Plan


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "eval",
        help="evaluate a checkpoint, or the model, on the recipe's eval sets",
        description="Generate answers to the prompts of the recipe's eval.sets and print avg@k and "
        "pass@k, for the newest checkpoint in output_dir, or for the model where there is none.",
    )
    add_recipe(command)
    command.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="take the checkpoint after N steps; by default the newest",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    die_with_torchrun()
    recipe = read_recipe(args)
    from mrl.run import console
    from parallel.mesh import destroy_mesh, world_size

    step, metrics, samples = evaluate_recipe(recipe, world_size(), args.step, str(args.recipe))
    if os.environ.get("RANK", "0") == "0":
        console.evaluation(metrics)
        what = f"the weights after {step} steps" if step else recipe.model.path
        print(f"evaluated {what}; samples: {samples}")
    destroy_mesh()


def evaluate_recipe(
    recipe: Recipe, world: int, step: int | None, source: str = "recipe"
) -> tuple[int, dict[str, float], Path]:
    """Check a recipe and evaluate it as `evaluate_checkpoint` does, on this rank of `world`.

    Returns the file with the samples too. `source` is what messages call the recipe.
    """
    if not recipe.eval.sets:
        raise InputError(
            f"{source}: eval.sets is empty; add a set, e.g. eval.sets: [{{name: test, path: "
            "data/test.jsonl, samples_per_prompt: 8}]"
        )
    from mrl.preflight import check
    from mrl.preflight.roles import as_colocated

    plan = check(as_colocated(recipe), world, allowed=None)  # the run is not changed
    folder = RunFolder(plan.recipe.output_dir)
    if step is not None and not (folder.checkpoints / f"iter_{step:07d}").is_dir():
        raise InputError(f"step {step}: {folder.checkpoints} has no checkpoint of that step")
    done, metrics = evaluate_checkpoint(plan, folder, step)
    return done, metrics, folder.evals / f"step_{done:06d}.jsonl"


def evaluate_checkpoint(
    plan: Plan, folder: RunFolder, step: int | None
) -> tuple[int, dict[str, float]]:
    """Evaluate the checkpoint of `step`, by default the newest one, or the model where there is none.

    Needs the policy's weights and an engine: no optimizer, learner or critic is built. Returns the
    steps that were done (0: the model) and `eval/*`.
    """
    from mrl.run import console
    from parallel import prepare

    prepare()
    from mrl.learn.saves import make_checkpoints
    from mrl.trainer import evaluate, make_collector, make_policy
    from parallel.mesh import init_mesh

    recipe = plan.recipe
    mesh = init_mesh(plan.dims, recipe.seed, timeout_s=recipe.longest_wait_s)
    progress = console.progress if mesh.rank == 0 else nullcontext
    folder.logs = folder.evals / "logs"  # not the engines' of a run that trains meanwhile
    folder.logs.mkdir(parents=True, exist_ok=True)
    with progress("loading the model"):
        policy = make_policy(plan.recipe, plan.model, mesh, plan.adapter, trains=False)
    collector = make_collector(plan, mesh, folder)
    try:
        with progress(collector.start_text):
            collector.start(policy)
        done, checkpoints = 0, make_checkpoints(recipe, mesh, folder)
        if step is not None:
            done = checkpoints.load(step, policy).step
        elif plan.checkpoint_step is not None:
            done = checkpoints.load_newest(policy).step
        return done, evaluate(policy, collector, done)
    finally:
        collector.close()
        policy.close()
