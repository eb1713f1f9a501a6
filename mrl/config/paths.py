"""Makes the paths of a recipe hold from any directory.

A relative path of a recipe is looked for in the current directory, then in the folder of the recipe,
then in the folders above that one. The first that exists is taken, as an absolute path. A path that is
nowhere stays as it was given, so that the message about it shows what the user wrote.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NOT_OURS = ("server_args", "megatron", "arguments")
"""Branches whose keys belong to SGLang, Megatron and the user's environment."""
REWARD_MODEL = "reward_model:"
FORMS = ("trl:", "verl:", "slime:")
"""What may stand before a reward that is a file."""


def hold_paths(tree: dict[str, Any], recipe: Path | None) -> dict[str, Any]:
    """Return the tree of a recipe with every path that exists made absolute.

    Paths are the values of `path`, of keys that end with `_path` and of `load_rollouts`, and everywhere
    plug-ins that are files (`file.py`, `file.py:NAME`) and reward models (`reward_model:FOLDER`).
    `recipe` is the file that the tree is from; None looks in the current directory only.
    """
    return _branch(tree, _folders(recipe))


def _folders(recipe: Path | None) -> list[Path]:
    """Return where relative paths are looked for, in order; never the root of the file system."""
    here = Path.cwd()
    if recipe is None:
        return [here]
    return [here, *(folder for folder in recipe.absolute().parents if folder != folder.parent)]


def _branch(tree: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    return {
        key: value if key in NOT_OURS else _held(value, folders, is_path=_is_path(key))
        for key, value in tree.items()
    }


def _is_path(key: Any) -> bool:
    return isinstance(key, str) and (
        key in ("path", "load_rollouts") or (key.endswith("_path") and key != "model_path")
    )


def _held(value: Any, folders: Sequence[Path], *, is_path: bool) -> Any:
    if isinstance(value, dict):
        return _branch(value, folders)
    if isinstance(value, list):
        return [_held(each, folders, is_path=is_path) for each in value]
    if not isinstance(value, str):
        return value
    if value.startswith(REWARD_MODEL):
        return REWARD_MODEL + _find(value.removeprefix(REWARD_MODEL), folders)
    form = next((each for each in FORMS if value.startswith(each)), "")
    value = value.removeprefix(form)
    file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    if is_path or file.endswith(".py"):
        return form + _find(file, folders) + colon + name
    return form + value


def _find(path: str, folders: Iterable[Path]) -> str:
    """Return the first `folder / path` that exists, or that is a pattern of files that exist; `path`
    where there is none."""
    if not path:
        return path
    wanted = os.path.expanduser(path)
    for folder in folders:
        place = os.path.normpath(folder / wanted)
        if os.path.exists(place) or (glob.has_magic(place) and glob.glob(place, recursive=True)):
            return place
    return path
