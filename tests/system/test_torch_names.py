"""The table of torch's private names fits the installed release, and the code uses just its names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mrl.engines.handles import DEVICE_FIELD
from mrl.system import torch_names
from mrl.system.releases import locate
from mrl.system.torch_names import NAMES, TORCH
from mrl.watch.collectives import METHODS

ROOT = Path(__file__).parents[2]
FILES = sorted(p for room in ("mrl", "moe", "parallel") for p in (ROOT / room).rglob("*.py"))


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


PRIVATE = [path for name in NAMES.values() if is_private(path := name.path("2.13"))]


@pytest.mark.parametrize("key", NAMES)
def test_the_installed_torch_has_the_name(key: str) -> None:
    name = NAMES[key]
    if "NCCL" in key and not dist.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    owner, last = locate(name.path("2.13"))
    found = getattr(owner, last)
    assert [each for each in name.attributes if not hasattr(found, each)] == []
    if name.arguments:
        assert tuple(inspect.signature(found).parameters)[: len(name.arguments)] == name.arguments


def test_the_table_says_what_the_modules_rely_on() -> None:
    assert NAMES["rebuild_cuda_tensor"].arguments[DEVICE_FIELD] == "storage_device"


@pytest.mark.parametrize(
    "methods",
    [*METHODS.values(), ("_allgather_base", "all_gather_single"),
     ("_reduce_scatter_base", "reduce_scatter_single")],
)  # fmt: skip
def test_each_collective_has_a_method_that_the_watchdog_knows(methods: tuple[str, ...]) -> None:
    assert any(hasattr(TORCH.take("ProcessGroup"), method) for method in methods)


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """Return the path of `a.b.c` below torch; empty for anything else. `known`: names of modules."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (path := dotted(node.value, known)):
        return f"{path}.{node.attr}"
    return ""


def private_names(source: str) -> Iterator[str]:
    """Yield each path below torch with a private part that a file imports or reads."""
    tree, known, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            path = dotted(node.value, known)
            known |= {t.id: path for t in targets if isinstance(t, ast.Name) and path}
    found |= {dotted(node, known) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    yield from filter(is_private, found)


def undeclared(source: str) -> list[str]:
    def is_known(path: str) -> bool:
        return any(
            path == each or path.startswith(f"{each}.") or each.startswith(f"{path}.")
            for each in PRIVATE
        )

    return sorted(path for path in private_names(source) if not is_known(path))


def test_every_private_name_of_torch_is_in_the_table() -> None:
    sources = {
        str(path.relative_to(ROOT)): text for path in FILES if "torch" in (text := path.read_text())
    }
    assert {path: names for path, text in sources.items() if (names := undeclared(text))} == {}


def test_code_uses_every_name_of_the_table() -> None:
    texts = [path.read_text() for path in FILES if path != Path(torch_names.__file__)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    words.add(
        "rebuild_cuda_tensor"
    )  # engine_group.py relies on its arguments, and does not call it
    assert [key for key in NAMES if key.rpartition(".")[2] not in words] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._cuda_getDeviceCount()", ["torch._C._cuda_getDeviceCount"]),
        ("import torch\ntorch.cuda._lazy_init()", ["torch.cuda._lazy_init"]),
        ("import torch.distributed as dist\nx = dist.distributed_c10d\nx._rank_not_in_group(g)",
         ["torch.distributed.distributed_c10d._rank_not_in_group"]),
        ("from torch.distributed.checkpoint.filesystem import _metadata_fn as f",
         ["torch.distributed.checkpoint.filesystem._metadata_fn"]),
        ("import torch\nclass A:\n    x = torch.ones(1)\n    def f(self): self._x.add_(1)", []),
        ("from torch._C import _distributed_c10d as c10d\nc10d.Work.wait", []),
    ],
)  # fmt: skip
def test_the_search_finds_private_names(source: str, found: list[str]) -> None:
    assert undeclared(source) == found
