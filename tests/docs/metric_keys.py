"""The metric keys that the code writes, found in its source, and those that docs/metrics.md documents.

A *form* is a key with `<>` for every part that the code fills in: `reward/zero_signal/<>`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from mrl.learn.throughput import PARTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/metrics.md"
ROOMS = ("mrl", "moe", "parallel")

FORM = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9_@<>]+)+")
NOT_METRICS = frozenset(
    {
        "application/json", "text/html", "s/step", "tokens/s", "repeat/<>", "environment/<>",
        "endpoint/<>",
        "difference/<>", "size/<>",
        "first/<>", "without/<>", "without/<>/logprob_abs_mean", "mismatch/percentiles",
        "reward/zero_signal", "routing/margin", "dynamic_sampling/zero_signal",
        "rollout/canary", "self/cgroup",
    }
)  # fmt: skip
"""Forms that look like metric keys: media types, files of /proc, names in a file, prefixes of keys."""


@cache
def documented() -> frozenset[str]:
    """The keys in the first column of the page's tables."""
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    twice = sorted({key for key in rows if rows.count(key) > 1})
    assert not twice, f"{PAGE.name} documents {twice} twice"
    return frozenset(rows)


def _walk(tree: ast.AST) -> Iterator[ast.Call | tuple[str, int]]:
    """The calls of a module, and (form, line) of its strings. What stands between the braces of an
    f-string is part of its form and no string of its own."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "<>" for v in node.values]
            text = "".join(map(str, parts))
            yield text + "<>" * text.endswith("/"), node.lineno
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        if isinstance(node, ast.Call):
            yield node
        todo.extend(ast.iter_child_nodes(node))


@cache
def _source() -> tuple[dict[str, str], list[ast.Call]]:
    """Every form with one place where it stands, and the calls outside the engines, whose own clock
    reports nothing."""
    strings: dict[str, str] = {}
    calls: list[ast.Call] = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for found in _walk(ast.parse(path.read_text())):
            if isinstance(found, tuple):
                strings[found[0]] = f"{name}:{found[1]}"
            elif not name.startswith("mrl/engines/"):
                calls.append(found)
    return strings, calls


def arguments_of(function: str | None = None, keyword: str | None = None) -> set[str]:
    """The strings in the first argument of the calls of `function`, or in any argument `keyword`."""
    found: set[str] = set()
    for call in _source()[1]:
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        given = call.args[:1] if function and name == function else []
        given = given + [k.value for k in call.keywords if keyword and k.arg == keyword]
        parts = [n.value for value in given for n in ast.walk(value) if isinstance(n, ast.Constant)]
        found |= {part for part in parts if isinstance(part, str)}
    return found


@cache
def written() -> dict[str, str]:
    """The forms of the keys that the code writes, with one place in the source each."""
    strings = _source()[0]
    forms = {s: at for s, at in strings.items() if FORM.fullmatch(s) and s not in NOT_METRICS}
    parts = arguments_of("part") | arguments_of(keyword="clock_name")
    expanded = {
        **{
            f"throughput/<>_tokens_per_{unit}": [f"throughput/{p}_tokens_per_{unit}" for p in PARTS]
            for unit in ("s", "gpu_s")
        },
        "time/<>_s": [f"time/{part}_s" for part in parts],
        "memory/<>/<>_<>_bytes": [
            f"memory/{phase}/<>_{place}_bytes"
            for phase in arguments_of("memory_statistics")
            for place in ("device", "host")
        ],
        "memory/<>/device_used_bytes": [
            f"memory/{p}/device_used_bytes" for p in ("awake", "asleep")
        ],
        "memory/<>/engine_device_bytes": [
            f"memory/{p}/engine_device_bytes" for p in ("awake", "asleep")
        ],
    }
    for form, keys in expanded.items():
        assert keys, f"nothing fills in {form}: has a function in metric_keys.py been renamed?"
        forms |= dict.fromkeys(keys, forms.pop(form))
    for form, at in list(forms.items()):  # dynamic_sampling.py renames these keys
        if form.startswith("reward/zero_signal"):
            forms[form.replace("reward/", "dynamic_sampling/")] = at
    return forms


def _pattern(form: str) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, form.split("<>"))))


def is_written(key: str) -> bool:
    """Whether the code writes a documented key: some form of the source gives it, with words for the
    parts that are filled in that stand in the source too."""
    strings = _source()[0]
    key = re.sub(r"<\w+>", "<>", key)
    if "/" not in key:
        return key in strings
    if key in written():
        return True
    forms = [*written(), *(s for s in strings if s.startswith("<>/layer_"))]
    for form in (f for f in forms if "<>" in f):
        match = _pattern(form).fullmatch(key)
        if match and all(
            part == "<>" or (is_written(part) if "/" in part else part in strings)
            for part in match.groups()
        ):
            return True
    return False


def undocumented_forms() -> dict[str, str]:
    """The forms that the page does not document, with their place in the source."""
    keys = {re.sub(r"<\w+>", "<>", key) for key in documented()}
    return {
        form: at
        for form, at in written().items()
        if form not in keys and not any(_pattern(form).fullmatch(key) for key in keys)
    }


def undocumented(keys: Iterable[str]) -> list[str]:
    """Those of a run's own metric keys that the page does not document."""
    patterns = [
        re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", key)))) for key in documented()
    ]
    return sorted(key for key in keys if not any(p.fullmatch(key) for p in patterns))
