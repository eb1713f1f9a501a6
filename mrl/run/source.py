"""Reads a command's recipe from a YAML file, or from a run folder that may have been moved."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from mrl.config import Recipe, load_recipe
from mrl.config.paths import FORMS, REWARD_MODEL
from mrl.errors import InputError

OF_A_RUN = ("checkpoints", "metrics.jsonl", "history.jsonl")
"""Names of files and folders next to the config.yaml of a run. If none of them exists, the
config.yaml is a recipe without a run."""


def read_source(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe in a YAML file or a run folder, with `overrides` applied.

    If `path` is a run folder, the `output_dir` of the recipe is that folder. Raises InputError if
    `path` is the config.yaml of a run folder that was copied or moved: its `output_dir` still names
    the old folder, so the run there would be trained instead. This is not checked if `overrides`
    sets `output_dir`.
    """
    overrides = overrides or []
    if path.is_dir():
        return load_run(path, overrides)
    recipe = load_recipe(path, overrides)
    is_asked = any(item.startswith("output_dir=") for item in overrides)
    if not is_asked and is_run(path.parent) and path.name == "config.yaml":
        _refuse_another(path, recipe)
    return recipe


def load_run(
    folder: Path, overrides: list[str] | None = None, config: Path | None = None
) -> Recipe:
    """Return the recipe of a run folder, which may have been moved.

    The recipe is read from `config`, by default the folder's config.yaml. The recipe's `output_dir`
    becomes `folder`. A path inside the old `output_dir` becomes the same path inside `folder` if a file
    or folder exists there. That includes globs, `FILE.py:NAME`, and paths after a prefix of a reward,
    such as `reward_model:`. Raises InputError if `config` does not exist, or if `overrides` set another
    `output_dir`.
    """
    config = config or folder / "config.yaml"
    if not config.is_file():
        raise InputError(
            f"{folder} is a folder without config.yaml; give a recipe (a YAML file), or the "
            "output_dir of a run"
        )
    for item in overrides or []:
        key, _, value = item.partition("=")
        if key == "output_dir" and not _same(Path(value), folder):
            raise InputError(
                f"output_dir={value}: {folder} is continued where it is; copy the folder and train the "
                f"copy, or make a run of its checkpoint: mrl branch {folder} {value}"
            )
    return load_recipe(config, overrides, lambda tree: _move(tree, folder))


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: a config.yaml, and at least one of the names in OF_A_RUN."""
    config = folder / "config.yaml"
    return config.is_file() and any((folder / name).exists() for name in OF_A_RUN)


def _refuse_another(path: Path, recipe: Recipe) -> None:
    folder, output = path.parent, Path(recipe.output_dir)
    if _same(output, folder):
        return
    there = "which is another folder" if output.exists() else "which is not there"
    other = f", or that run with: mrl train {output}" if is_run(output) else ""
    raise InputError(
        f"{path} belongs to the run in {folder}, but its output_dir is {output}, {there}: was the run "
        f"copied or moved? Continue the run in {folder} with: mrl train {folder}{other}; for a new run "
        "give output_dir=NEW_DIR"
    )


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _move(tree: dict[str, Any], folder: Path) -> None:
    """Set a recipe's `output_dir` to `folder`, and adapt the paths inside the old `output_dir`."""
    old = tree.get("output_dir")
    if isinstance(old, str) and _same(Path(old), folder):
        return
    tree["output_dir"] = str(folder)
    if isinstance(old, str):
        for name, value in tree.items():
            tree[name] = _moved(value, old.rstrip("/") + "/", folder)


def _moved(value: Any, old: str, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _moved(part, old, folder) for name, part in value.items()}
    if isinstance(value, list):
        return [_moved(part, old, folder) for part in value]
    return _moved_text(value, old, folder) if isinstance(value, str) else value


def _moved_text(value: str, old: str, folder: Path) -> str:
    form = next((each for each in (*FORMS, REWARD_MODEL) if value.startswith(each)), "")
    path = value.removeprefix(form)
    if not path.startswith(old):
        return value
    file, colon, name = path.rpartition(":") if ".py:" in path else (path, "", "")
    inner = os.path.relpath(file, old)
    here, pattern = str(folder / inner), os.path.join(glob.escape(str(folder)), inner)
    if os.path.exists(here):
        return f"{form}{here}{colon}{name}"
    is_there = glob.has_magic(inner) and glob.glob(pattern, recursive=True)
    return f"{form}{pattern}" if is_there else value
