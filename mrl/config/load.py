"""Reads a recipe with its overrides, and writes the resolved recipe. Every error message is one
line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mrl.config.explain import explain
from mrl.config.paths import resolve_paths
from mrl.config.recipe import Recipe
from mrl.config.service import ServiceConfig
from mrl.config.suggest import keys_below
from mrl.errors import InputError
from mrl.system.files import write_whole

RENAMED = {
    "warm_start": "sft",
    "rollout.unfinished": "rollout.partial_rollouts",
}
"""Maps former names of keys to the current names. A recipe with a former name is refused."""
OF_RECIPES = frozenset({"algorithm", "data", "optimizer"})
"""Sections that a recipe has and the configuration of a service has not."""
OF_SERVICES = frozenset({"control", "schedule", "tenants"})
"""Sections that the configuration of a service has and a recipe has not."""
LARGEST = 2**63
"""Whole numbers are below this one; no tensor takes larger ones."""
_SURPRISING = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9._]+)+)")
"""Matches numbers that YAML 1.1 reads in base 8 (`010`) or 60 (`10:00`)."""


class BadMapping(yaml.YAMLError):
    """Raised for YAML that would be read otherwise than it looks: a key that occurs twice in a
    mapping, a value that was taken for a part of its key, a number in base 8 or 60, or an alias
    inside its own anchor."""


class _Loader(yaml.SafeLoader):
    """A `yaml.SafeLoader` that refuses duplicate keys, of which the base class would silently take the
    last value, `{a:b}`, which the base class reads as the key `a:b` without a value, and numbers like
    `010` and `10:00`, which the base class reads as 8 and 600."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                line = key_node.start_mark.line + 1
                if node.flow_style and _is_unspaced(key_node, value_node):
                    spaced = key_node.value.replace(":", ": ", 1)
                    raise BadMapping(
                        f"got {{{key_node.value}}}, which YAML reads as a key without a value; write "
                        f"{{{spaced}}}, with a space after the colon"
                    )
                if key_node.value in seen:
                    first = seen[key_node.value]
                    where = (
                        f", in lines {first} and {line}" if first != line else f" in line {line}"
                    )
                    raise BadMapping(
                        f"the key {key_node.value!r} occurs twice{where}; give it once"
                    )
                seen[key_node.value] = line
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        is_whole = node.tag == "tag:yaml.org,2002:int"
        value = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        if is_whole and abs(value) >= LARGEST:
            raise BadMapping(f"got {node.value[:40]}, expected a number of at most 63 bits")
        if _SURPRISING.fullmatch(node.value):
            raise BadMapping(
                f"got {node.value}, which YAML reads as {value}; write {value}, or put text in quotes"
            )
        return value


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def _parse(text: str) -> Any:
    """Return the value of a YAML text. Raises YAMLError if it has none."""
    try:
        value = yaml.load(text, _Loader)
        _refuse_cycles(value, (), set())
    except (ValueError, AttributeError, KeyError) as error:  # such as the 45th of a month, !!bool x
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return value


def _refuse_cycles(value: Any, above: tuple[int, ...], seen: set[int]) -> None:
    """Raise BadMapping if a mapping or list contains itself. `above` are the ids of the mappings and
    lists that contain `value`, and `seen` those that have been checked: aliases of aliases can give a
    short text a billion parts."""
    if id(value) in above:
        raise BadMapping("an alias (*name) is inside its own anchor (&name); write the value out")
    if isinstance(value, (dict, list)) and id(value) not in seen:
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_cycles(part, (*above, id(value)), seen)
        seen.add(id(value))


def _is_unspaced(key: yaml.ScalarNode, value: yaml.Node) -> bool:
    """Return whether an item of a flow mapping is `a:b`, where `a: b` was meant, and not `a:b:`, a key
    with an empty value."""
    is_absent = (
        isinstance(value, yaml.ScalarNode) and value.start_mark.index == value.end_mark.index
    )
    end = key.end_mark
    has_colon = end.buffer is not None and end.buffer[end.pointer :].lstrip().startswith(":")
    return key.style is None and ":" in key.value and is_absent and not has_colon


def load_recipe(
    path: str | Path,
    overrides: list[str] | None = None,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> Recipe:
    """Read a recipe and apply `dotted.key=value` overrides, whose values are YAML.

    Relative paths become absolute, see mrl/config/paths.py. `prepare` may change the parsed recipe
    before the overrides are applied. Raises InputError if the file cannot be read or the recipe is
    not valid; the message names the key, the given value, and what was expected or the nearest
    known key.
    """
    tree = resolve_paths(_read_yaml(Path(path)), Path(path))
    if _is_service(tree):
        raise InputError(
            f"{path} configures a service, and is no recipe; start it: mrl serve {path}"
        )
    if prepare is not None:
        prepare(tree)
    return recipe_of(tree, overrides, str(path))


def recipe_of(tree: dict[str, Any], overrides: list[str] | None, source: str) -> Recipe:
    """Build a recipe from the parsed recipe `tree`, to which the overrides are applied in place.

    `source` is the name of the recipe in error messages. Raises InputError like `load_recipe`.
    """
    apply_overrides(tree, overrides, source)
    try:
        return Recipe.model_validate(resolve_paths(tree, None))
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error)}") from None


def read_tree(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a recipe, apply overrides, and make paths absolute; return the keys as nested dicts.

    The keys and values are not checked, so the recipe may be incomplete. Raises InputError if the
    file cannot be read, is not YAML or has a renamed key, or if an override cannot be applied.
    """
    tree = resolve_paths(_read_yaml(path), path)
    apply_overrides(tree, overrides, str(path))
    return resolve_paths(tree, None)


def apply_overrides(tree: dict[str, Any], overrides: list[str] | None, source: str) -> None:
    """Apply `dotted.key=value` overrides to the parsed recipe `tree` in place. Raises InputError for
    an override that cannot be applied, and for former names of keys (`RENAMED`); `source` is the
    name of the recipe in the message."""
    _refuse_renamed(_keys_of(tree), source)
    _spread_short_forms(tree)
    for item in overrides or []:
        _refuse_renamed([item.partition("=")[0]], f"override {item!r}")
        _apply_override(tree, item)
        _spread_short_forms(tree)
    # An override may also set a whole section: rollout={unfinished: resume}.
    _refuse_renamed(_keys_of(tree), "overrides")


def load_service(path: str | Path, overrides: list[str] | None = None) -> ServiceConfig:
    """Read the configuration of a service. Overrides, paths and errors are handled as in
    `load_recipe`."""
    tree = resolve_paths(_read_yaml(Path(path)), Path(path))
    if not OF_RECIPES.isdisjoint(tree):
        raise InputError(
            f"{path} is a recipe, and configures no service; train it alone: mrl train {path}, or "
            f"in a service that runs: mrl tenants add {path} --service FOLDER"
        )
    for item in overrides or []:
        _apply_override(tree, item)
    try:
        return ServiceConfig.model_validate(resolve_paths(tree, None))
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error, keys_below(ServiceConfig))}") from None


def _is_service(tree: dict[str, Any]) -> bool:
    """Return whether the parsed file has keys of a service, and no section of recipes alone."""
    lora = tree.get("lora")
    own = OF_SERVICES & tree.keys() or (isinstance(lora, dict) and "max_rank" in lora)
    return bool(own) and OF_RECIPES.isdisjoint(tree)


def dump_recipe(recipe: Recipe | ServiceConfig, path: Path) -> None:
    """Write the recipe, including all defaults, as a YAML file that `load_recipe` or `load_service`
    can read again.

    All existing paths in the file, and `output_dir`, are absolute, so the file can be loaded from
    any directory.
    """
    tree = resolve_paths(recipe.model_dump(mode="json"), None)
    tree["output_dir"] = os.path.abspath(recipe.output_dir)
    # Atomically, because other ranks may be reading the file.
    write_whole(path, yaml.safe_dump(tree, sort_keys=False), durable=True)


def _refuse_renamed(keys: Iterable[str], source: str) -> None:
    """Raise InputError if any of the dotted `keys` is a former name, or lies in a section with a
    former name. The message gives the current names."""
    found: dict[str, str] = {}
    for key in keys:
        for old, new in RENAMED.items():
            if key == old or key.startswith(f"{old}."):
                found.setdefault(old, f"{old} was renamed: write {new}{key[len(old) :]}")
    if found:
        raise InputError(f"{source}: {'; '.join(found.values())}")


def _keys_of(tree: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{name}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = _parse(path.read_text())
    except OSError as error:
        hint = (
            "the recipe comes first, before overrides: RECIPE key=value"
            if "=" in path.name and not path.suffix.startswith(".y")
            else "give the path of a YAML file, or the output_dir of a run"
        )
        raise InputError(f"recipe {path}: {error.strerror}; {hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).replace(' in "<unicode string>",', " in").split())
        raise InputError(f"recipe {path} is not valid YAML: {first}") from None
    if tree is None:
        raise InputError(f"recipe {path}: the file is empty; `mrl recipe` prints one to fill in")
    if not isinstance(tree, dict):
        raise InputError(f"recipe {path}: expected a mapping of keys, got {type(tree).__name__}")
    _spread_short_forms(tree)
    return tree


def _spread_short_forms(tree: dict[str, Any]) -> None:
    """Replace `logging: [NAME, ...]` in `tree` by `logging: {trackers: [NAME, ...]}`, so that
    overrides can set the other keys of `logging`."""
    if isinstance(tree.get("logging"), list):
        tree["logging"] = {"trackers": tree["logging"]}


def _apply_override(tree: dict[str, Any], item: str) -> None:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise InputError(f"override {item!r}: expected key=value, e.g. optimizer.lr=1e-6")
    *parents, leaf = key.split(".")
    for depth, name in enumerate(parents):
        child = tree.setdefault(name, {})
        if child is None:
            child = tree[name] = {}
        if not isinstance(child, dict):
            raise InputError(
                f"override {item!r}: {'.'.join(parents[: depth + 1])} is a value, not a branch"
            )
        tree = child
    try:
        tree[leaf] = _parse(value)
        _refuse_comment(value)
    except BadMapping as error:
        raise InputError(f"override {item!r}: {error}") from None
    except yaml.YAMLError:
        raise InputError(f"override {item!r}: {value!r} is not a YAML value") from None


def _refuse_comment(text: str) -> None:
    """Raise BadMapping if a YAML text ends with a comment, as in `output_dir=runs/a #3`."""
    tokens = [each for each in yaml.scan(text) if not isinstance(each, yaml.StreamEndToken)]
    rest = text[max(each.end_mark.index for each in tokens) :].strip()
    if rest.startswith("#"):
        raise BadMapping(
            f"YAML reads {rest!r} as a comment; put the text in quotes, or leave it out"
        )
