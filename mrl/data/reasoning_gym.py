"""Writes prompts for the tasks of reasoning-gym; `mrl/rewards/reasoning_gym.py` scores the answers.

python -m mrl.data.reasoning_gym chain_sum --num 1000 --seed 1 --out train.jsonl --param max_terms=2
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from mrl.errors import InputError


def task_rows(
    task: str, num: int, seed: int, params: dict[str, Any], *, demonstrations: bool = False
) -> list[dict[str, Any]]:
    """Return `num` rows with the columns `prompt`, `answer` and `info` (the task's name and metadata,
    for its verifier); with `demonstrations`, rows with `prompt` and `completion`.

    `params` are the parameters of the task. Raises InputError for an unknown task or parameter, if
    reasoning-gym is not installed, and for demonstrations of a task whose answers are not strings.
    """
    rows = []
    for entry in _dataset(task, num, seed, params):
        if not demonstrations:
            info = {"task": task, "metadata": entry["metadata"]}
            rows.append({"prompt": entry["question"], "answer": entry["answer"], "info": info})
        elif isinstance(entry["answer"], str):
            rows.append({"prompt": entry["question"], "completion": entry["answer"]})
        else:
            raise InputError(f"task {task!r} has no single answer to demonstrate")
    return rows


def _dataset(task: str, num: int, seed: int, params: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise InputError("reasoning-gym is not installed; pip install 'mrl[tasks]'") from None
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"reasoning-gym has no task {task!r}{hint}")
    try:
        return create_dataset(task, size=num, seed=seed, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(f"task {task!r}: {error}") from None


def parse_param(item: str) -> tuple[str, Any]:
    """Parse `key=value`, with the value as YAML. Raises InputError if `item` has no key or no `=`."""
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise InputError(f"--param {item!r}: expected key=value, e.g. max_terms=2")
    return key, yaml.safe_load(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("task")
    parser.add_argument("--num", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--param", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--demonstrations", action="store_true", help="prompt + completion rows")
    args = parser.parse_args()
    try:
        params = dict(parse_param(item) for item in args.param)
        rows = task_rows(args.task, args.num, args.seed, params, demonstrations=args.demonstrations)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
