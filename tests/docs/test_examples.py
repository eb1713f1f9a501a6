"""The examples of the pages are true: they compile, load, run, and their recipes pass `mrl check`."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mrl.cli import main
from mrl.environments import resolve_environment
from mrl.toy_model import write_toy_model
from tests.docs.pages import ROOT, Block, Page, pages
from tests.docs.recipe_keys import is_key, keys_of

TOY_MODEL = "toy/model"
"""What a recipe that needs nothing else has as its model."""


def blocks(language: str) -> Iterator[tuple[Page, Block]]:
    return ((p, block) for p in pages() for block in p.blocks if block.language == language)


def examples(text: str) -> list[tuple[str, str]]:
    """(page and line, source) of the Python blocks that hold `text`."""
    return [(f"{p.name}:{b.line}", b.text) for p, b in blocks("python") if text in b.text]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy_model(folder)
    return folder


def checked(recipe: str, *overrides: str) -> None:
    """`mrl check`, which ends the test where it refuses something."""
    main(["check", str(ROOT / recipe), *overrides])


def test_python_compiles() -> None:
    found = list(blocks("python"))
    assert found
    for page, block in found:
        ast.parse(textwrap.dedent(block.text), filename=f"{page.name}:{block.line}")


def test_yaml_has_keys_of_the_recipe() -> None:
    problems = [
        f"{page.name}:{block.line}: the recipe has no key {key}"
        for page, block in blocks("yaml")
        for key in keys_of(yaml.safe_load(block.text))
        if not is_key(key)
    ]
    assert not problems, "\n".join(problems)


def test_the_example_of_a_reward_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = examples("def score(")
    assert found
    data = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in (11, 23, 35)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, (place, source) in enumerate(found):
        file = tmp_path / f"reward_{number}.py"
        file.write_text(source)
        main(["reward", "test", f"{file}:score", str(data)])
        assert "ok:" in capsys.readouterr().out, place


def test_the_example_of_an_environment_is_one(tmp_path: Path) -> None:
    found = examples("def reset(")
    assert found
    for number, (place, source) in enumerate(found):
        file = tmp_path / f"environment_{number}.py"
        file.write_text(source)
        (name,) = re.findall(r"^class (\w+)", source, re.MULTILINE)
        environment = resolve_environment(f"{file}:{name}")()
        environment.reset("2 + 2 =", seed=0, answer="4")
        wrong, right = environment.step("5"), environment.step("4")
        assert (wrong.done, right.done) == (False, True), place
        assert right.reward > wrong.reward == 0.0, place


def test_the_example_of_an_algorithm_passes_mrl_check(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/algorithms/test_docs.py computes with it."""
    found = examples("sequence_weights =")
    assert found
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    for number, (place, source) in enumerate(found):
        package = tmp_path / f"package_{number}"
        package.mkdir()
        (package / "median.py").write_text(source)
        paths = [f"model.path={toy}", f"output_dir={tmp_path / 'run'}"]
        checked("launch/recipes/toy_moe.yaml", f"algorithm.name={package.name}.median", *paths)
        assert capsys.readouterr().out.strip().endswith("ok"), place


def test_the_recipes_of_the_pages_pass_mrl_check(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that need nothing but the toy model, which most pages take for granted."""
    named = {
        name for page in pages() for name in re.findall(r"launch/recipes/\w+\.yaml", page.text)
    }
    toys = [
        name
        for name in sorted(named)
        if yaml.safe_load((ROOT / name).read_text())["model"]["path"] == TOY_MODEL
    ]
    assert "launch/recipes/toy_moe.yaml" in toys
    monkeypatch.chdir(ROOT)
    for name in toys:
        checked(name, f"model.path={toy}", f"output_dir={tmp_path / 'run'}")
        assert capsys.readouterr().out.strip().endswith("ok"), name
