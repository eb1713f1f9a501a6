"""Resolves the paths in a recipe, so that the recipe works from any directory.

A relative path is looked up in the current directory, then in the recipe's folder, then in the
parents of that folder. The first match is used, as an absolute path. A path that does not exist is
left unchanged, so that the error message shows what the user wrote.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mrl.errors import InputError

NOT_OURS = ("server_args", "megatron", "arguments", "columns", "chat_template_kwargs", "stop")
"""Keys whose values are arguments of SGLang, Megatron, the environment class or the chat template,
names of columns, or text to stop at. Paths in these values are not resolved."""
NEW_FOLDERS = ("output_dir", "snapshot_folder")
"""Keys with the path of a folder that mrl makes. Such a path is not searched for."""
VARIABLE = re.compile(r"\$(\w|\{\w)")
"""Matches the beginning of a shell's variable: `$HOME`, `${HOME}`."""
REWARD_MODEL = "reward_model:"
FORMS = ("trl:", "verl:", "slime:")
"""Prefixes of a reward (`trl:file.py`) that name the framework for which the reward was written."""


def resolve_paths(tree: dict[str, Any], recipe: Path | None) -> dict[str, Any]:
    """Return a recipe, given as nested dicts, with every existing path made absolute, and `~`
    replaced in the paths of NEW_FOLDERS.

    A value is a path if its key is `path` or `load_rollouts`, or ends with `_path` (except
    `model_path`), or if its key is `verifiers` or `python` and it has a slash. A value that names a
    Python file (`file.py`, `file.py:NAME`) or a reward model (`reward_model:FOLDER`) is a path
    under any key. `recipe` is the file that the tree comes from; with None, only the current
    directory is searched, and InputError is raised if the path of a new folder contains a shell's
    variable.
    """
    if recipe is None:  # overrides have been applied
        _refuse_variables(tree)
    return _branch(tree, _folders(recipe))


def _folders(recipe: Path | None) -> list[Path]:
    """Return the folders to search for relative paths, in order. The root of the file system is not
    among them."""
    here = Path.cwd()
    if recipe is None:
        return [here]
    return [here, *(folder for folder in recipe.absolute().parents if folder != folder.parent)]


def _branch(tree: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    return {
        key: value
        if key in NOT_OURS
        else os.path.expanduser(value)
        if key in NEW_FOLDERS and isinstance(value, str)
        else _resolved(value, folders, is_path=_is_path(key) or _is_path_with_slash(key, value))
        for key, value in tree.items()
    }


def _refuse_variables(tree: dict[str, Any], section: str = "") -> None:
    """Raise InputError for a shell's variable in the path of a new folder, whose name it would
    become."""
    for key, value in tree.items():
        if key in NOT_OURS:
            continue
        if isinstance(value, dict):
            _refuse_variables(value, f"{section}{key}.")
        elif key in NEW_FOLDERS and isinstance(value, str) and VARIABLE.search(value):
            raise InputError(
                f"{section}{key}: got {value!r}, but variables are not replaced in a recipe; write the "
                f"folder itself, or give {section}{key}={value} on the command line without quotes"
            )


def _is_path(key: Any) -> bool:
    return isinstance(key, str) and (
        key in ("path", "load_rollouts") or (key.endswith("_path") and key != "model_path")
    )


def _is_path_with_slash(key: Any, value: Any) -> bool:
    """Return whether a value is a path if it has a slash, and otherwise the name of a package or of a
    program."""
    return key in ("verifiers", "python") and isinstance(value, str) and "/" in value


def _resolved(value: Any, folders: Sequence[Path], *, is_path: bool) -> Any:
    if isinstance(value, dict):
        return _branch(value, folders)
    if isinstance(value, list):
        return [_resolved(each, folders, is_path=is_path) for each in value]
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
    """Return the first `folder / path` that exists, or that is a glob pattern with a match. Return
    `path` unchanged if there is none."""
    if not path:
        return path
    wanted = os.path.expanduser(path)
    for folder in folders:
        place = os.path.normpath(folder / wanted)
        if os.path.exists(place) or (glob.has_magic(place) and glob.glob(place, recursive=True)):
            return place
    return path
