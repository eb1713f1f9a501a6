"""Evaluate a checkpoint or a model on the eval sets of a recipe."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from mrl.config import Recipe
from mrl.errors import InputError
from mrl.run.evaluations import folder_of_settings, other_settings
from mrl.run.folder import RunFolder
from parallel.checkpoint.manifest import folder_name


def evaluate_recipe(
    recipe: Recipe, world: int, step: int | None, source: str = "recipe"
) -> tuple[int, dict[str, float], Path]:
    """Check a recipe and evaluate a checkpoint on this rank.

    Only the policy and the engines are created, without optimizer, learner and critic. `world` is
    the number of ranks. `step` is the step of the checkpoint; None means the newest checkpoint, or
    the model of `model.path` if the run has no checkpoint. `source` names the recipe in messages.

    Returns the step that was evaluated (0 for the model of `model.path`), the metrics `eval/*`, and
    the path of the file with the samples. If settings of the evaluation differ from those of the run
    in `output_dir`, the files are in a folder of their own (`mrl.run.evaluations`). Raises InputError
    if the recipe has no evaluation set, or if there is no checkpoint of `step`.
    """
    if not recipe.eval.sets:
        raise InputError(
            f"{source}: eval.sets is empty; add a set, e.g. eval.sets: [{{name: test, path: "
            "data/test.jsonl, samples_per_prompt: 8}]"
        )
    from mrl.preflight import check
    from mrl.preflight.roles import as_colocated

    plan = check(as_colocated(recipe), world, allowed=None)  # every key may differ from the run's
    folder = RunFolder(plan.recipe.output_dir)
    if step is not None and not (folder.checkpoints / folder_name(step)).is_dir():
        raise InputError(f"step {step}: {folder.checkpoints} has no checkpoint of that step")
    from mrl.run import console
    from parallel import prepare

    prepare()
    import torch.distributed as dist

    from mrl.learn.saves import make_checkpoints
    from mrl.trainer import evaluate, make_collector, make_policy
    from parallel.mesh import init_mesh

    recipe = plan.recipe
    mesh = init_mesh(plan.dims, recipe.seed, timeout_s=recipe.longest_wait_s)
    evals = [folder.evals]
    if mesh.rank == 0 and (other := other_settings(folder.root, plan.update)):
        evals = [folder_of_settings(folder.evals, other)]
        console.note(
            f"these settings differ from the run's: {', '.join(other)}; the result is in {evals[0]}, "
            "and not among the run's own evaluations"
        )
    dist.broadcast_object_list(evals)  # only rank 0 compares the contents of files
    progress = console.progress if mesh.rank == 0 else nullcontext
    folder.logs = folder.evals / "logs"  # the run itself may be training and writing to logs/
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.evals = evals[0]
    with progress("loading the model"):
        policy = make_policy(plan.recipe, plan.model, mesh, plan.adapter, trains=False)
    collector = make_collector(plan, mesh, folder)
    try:
        with progress(collector.start_text):
            collector.start(policy)
        done, checkpoints = 0, make_checkpoints(recipe, mesh, folder)
        if step is not None:
            saved = folder.checkpoints / folder_name(step)
            done = checkpoints.load_folder(saved, policy, advice="give another --step").step
        elif plan.checkpoint_step is not None:
            done = checkpoints.load_newest(policy, renames=False).step  # the run may be training
        metrics = evaluate(policy, collector, done)
    finally:
        collector.close()
        policy.close()
    return done, metrics, folder.evaluation_file(done).with_suffix(".jsonl")
