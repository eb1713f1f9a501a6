"""Functions of other frameworks, run from their own source without importing the rest of them.

A framework is a folder that an environment variable names; a test without it is skipped by name.
"""

from __future__ import annotations
import __future__ as future

import ast
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import torch

HOW = {
    "MRL_TEST_VERL": "pip install --no-deps --target FOLDER verl==0.9.1",
    "MRL_TEST_AREAL": "git clone --branch v1.0.4 https://github.com/inclusionAI/AReaL FOLDER",
}


def folder(variable: str) -> Path:
    """Return the folder that the variable names, or skip the test and say how to get one."""
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} is not set: {HOW[variable]}, and set it to FOLDER")
    return Path(found)


def functions(file: Path, names: tuple[str, ...], **known: Any) -> SimpleNamespace:
    """Run the definitions of these functions and methods, and of the file's constants, and no imports.

    Their decorators are left out. `known`: what they use beside torch.
    """
    tree = ast.parse(file.read_text())
    found: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            found.append(node)
    constants = [n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)]
    space: dict[str, Any] = {
        "torch": torch, "np": np, "Any": Any, "Optional": Optional, "defaultdict": defaultdict,
        **known,
    }  # fmt: skip
    for node in [*constants, *found]:
        code = compile(ast.Module([node], []), str(file), "exec", future.annotations.compiler_flag)
        try:
            exec(code, space)
        except NameError:  # a constant that needs an import
            assert node in constants
    assert all(name in space for name in names), sorted(set(names) - set(space))
    return SimpleNamespace(**space)
