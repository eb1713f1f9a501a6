"""Find a checkpoint and write it as a Hugging Face folder, or as the PEFT folder of an adapter."""

from __future__ import annotations

from pathlib import Path

from mrl.config import Recipe, load_recipe
from mrl.errors import InputError
from mrl.run import console
from mrl.run.contents import digest_of
from mrl.run.folder import RunFolder
from parallel.checkpoint.manifest import candidates, damage, folder_name, newest_good, staying


def export(
    source: Path,
    target: Path,
    base: Path | None,
    max_shard_size_mb: int,
    architecture: str | None = None,
    *,
    merged: bool = False,
    quantization: str = "none",
) -> None:
    """Export a checkpoint to the folder `target`.

    `source` is a checkpoint folder, or a run folder, of which the newest undamaged checkpoint is
    exported. `base`, `architecture`, `merged` and `quantization` are passed to
    `parallel.checkpoint.hf_export.export_checkpoint`. Raises InputError if `source` has no
    undamaged checkpoint, if `target` cannot be written, or if the shard size is below 1 MiB.
    """
    if max_shard_size_mb < 1:
        raise InputError(f"--max-shard-size-mb {max_shard_size_mb}: expected at least 1")
    folder = _find(source)
    if merged:
        _warn_of_other_base(_run_of(folder), base)
    from parallel.checkpoint.hf_export import export_checkpoint  # with torch

    with staying(folder), console.progress(f"exporting {folder}"):
        done = export_checkpoint(
            folder,
            target,
            base=base,
            max_bytes=max_shard_size_mb << 20,
            notes=_notes(_run_of(folder)),
            architecture=architecture,
            merged=merged,
            quantization=quantization,
        )
    print(
        f"wrote the {done.what} after {done.step} steps to {target}: {done.num_tensors} tensors in "
        f"{done.num_files} file(s)"
        + f", {done.num_untrained} of them untrained, as in the base model"
        * bool(done.num_untrained)
    )


def _find(source: Path) -> Path:
    """Return the folder of the checkpoint to export.

    It is `source` itself or, if `source` is a run folder, its newest undamaged checkpoint. Raises
    InputError if the checkpoint `source` is damaged, or if the run has no undamaged checkpoint.
    """
    source = source if source.name else source.absolute()  # the current folder
    if source.name.startswith("iter_") and source.is_dir():
        if reason := damage(source):
            raise InputError(f"checkpoint {source.name} is damaged: {reason}; export another one")
        return source
    found = newest_good(candidates(source / "checkpoints"), damage, console.warning)
    if found is None:
        run, _, step = source.name.rpartition("@")
        if step.isdigit() and (saved := source.with_name(run) / "checkpoints").is_dir():
            names = ", ".join(each.name for each in candidates(saved)) or "none"
            raise InputError(
                f"{source} is not a folder; give {saved / folder_name(int(step))} (there are {names})"
            )
        raise InputError(
            f"{source} has no checkpoint; give a run folder (output_dir), or one iter_* folder of its "
            "checkpoints"
        )
    return found


def _run_of(folder: Path) -> Path:
    """Return the folder that is the run folder of a checkpoint, if it has one: two levels up, or three
    for the named states and samplers of a session."""
    above = folder.absolute().parents[1:3]
    return next((each for each in above if RunFolder(each).config.is_file()), above[0])


def _warn_of_other_base(run: Path, base: Path | None) -> None:
    """Warn if the adapter is merged into a base model other than the model it was trained on.

    If the checkpoint is not in a run folder, it is unknown on which model the adapter was trained,
    and nothing is checked.
    """
    folder = RunFolder(run)
    trained_on = folder.history.contents().get("model.path")
    if trained_on is None or not folder.config.is_file():
        return
    path = base or Path(load_recipe(folder.config).model.path)
    if path.is_dir() and digest_of(str(path.absolute())) != trained_on:
        console.warning(
            f"the files of {path} are not those on which the adapter was trained: merged into other "
            "weights it is another policy"
        )


def _task(recipe: Recipe) -> dict[str, str]:
    if recipe.environment is not None:
        name = recipe.environment.name
        return {"environment": recipe.environment.label if name is None else Path(name).name}
    from mrl.rewards.terms import all_terms

    names = (Path(term.path).name for term in all_terms(recipe))
    return {"reward": ", ".join(names)}


def _notes(run: Path) -> dict[str, str]:
    """Return the rows of the model card that come from the recipe of `run`, as {name: value}.

    The result is empty if `run` is not a run folder.
    """
    config = RunFolder(run).config
    if not config.is_file():
        return {}
    from mrl.data.reader import source_name

    recipe = load_recipe(config)
    replay = recipe.moe.routing_replay
    return {
        "algorithm": recipe.algorithm.name,
        **({"routing replay": replay} if replay != "off" else {}),
        "learning rate": str(recipe.optimizer.lr),
        **_task(recipe),
        "prompts": ", ".join(map(source_name, recipe.data.all_sources)),
        "samples a step": str(recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt),
        "longest response": f"{recipe.rollout.max_response_len} tokens",
        "seed": str(recipe.seed),
    }
