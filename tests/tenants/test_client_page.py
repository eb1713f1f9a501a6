"""docs/client.md: its first session runs as it is printed."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mrl.client
from mrl.config import ServiceConfig
from tests.tenants.serving import ROOT, environment

PAGE = (ROOT / "docs/client.md").read_text()
FIRST = PAGE.partition("## A first session")[2].partition("\n## ")[0]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", FIRST, re.DOTALL)
    return found


def test_the_first_session_is_written_for_this_client_and_service() -> None:
    ServiceConfig.model_validate(yaml.safe_load(block("yaml")))
    commands = block("bash").splitlines()
    assert [line.split()[:2] for line in commands[:2]] == [["mrl", "toy-model"], ["mrl", "serve"]]
    assert (ROOT / commands[2].split()[1]).is_file()
    tree = ast.parse(block("python"))
    imported = [
        n.name for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) for n in each.names
    ]
    assert imported
    assert not [name for name in imported if not hasattr(mrl.client, name)]
    called = {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "session"
    }
    assert {"encode_chat", "encode", "sample", "decode", "save"} <= called
    assert not [name for name in called if not hasattr(mrl.client.Session, name)]


@pytest.mark.parametrize("file", ["README.md", "docs", "launch"])
def test_one_folder_of_the_toy_model_in_all_docs(file: str) -> None:
    place = ROOT / file
    files = (
        [place]
        if place.is_file()
        else [*place.rglob("*.md"), *place.rglob("*.py"), *place.rglob("*.yaml")]
    )
    named = {
        (str(each.relative_to(ROOT)), folder)
        for each in files
        for folder in re.findall(r"mrl toy-model ([^\s`]+)", each.read_text())
    }
    others = {"DIR", "/nowhere", "toy/stability", "toy/collapse"}  # placeholders, and other toys
    assert not {(name, folder) for name, folder in named if folder not in {"toy/model", *others}}


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_the_first_session_runs_as_printed(tmp_path: Path) -> None:
    """The client starts beside the service, as the page's commands do, and waits for it."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "service.yaml").write_text(block("yaml"))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in (("mrl", "-m mrl"), ("python", "")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        tool.chmod(0o755)
    env = {**environment(), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    script = f"set -e\n{block('bash')}echo $! > pid\npython - <<'END'\n{block('python')}END\n"
    with open(tmp_path / "log", "w") as log:  # a pipe would stay open as long as the service runs
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
            timeout=900,
            check=False,
        )
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, said[-4000:]
    assert "reinforced: mean reward" in said
    assert "runs/alice/checkpoints" in said
    assert "Apex" not in said, said[-4000:]
    assert "Warning" not in said, said[-4000:]
