"""Every kind of plug-in is found by name, module, module:OBJECT, file and file:OBJECT."""

import importlib
import sys
from pathlib import Path

import pytest

from mrl.algorithms import list_algorithms, load_algorithm
from mrl.engines import engine_names, load_engine
from mrl.environments import environment_names, resolve_environment
from mrl.errors import InputError
from mrl.rewards import resolve_reward, reward_names
from parallel.architectures import architectures, load_architecture

REWARD = "def {}(prompts, completions, **columns): return [1.0] * len(prompts)\n"
ENVIRONMENT = """
class {}:
    def reset(self, prompt, seed, **columns): ...
    def step(self, action): ...
"""
ALGORITHM = """
def advantages(rewards, config): ...
def sequence_weights(counts, total, samples, config, longest): ...
def loss(logprobs, batch, config): ...
class Other:
    advantages, sequence_weights, loss = map(staticmethod, (advantages, sequence_weights, loss))
"""
ENGINE = "def {}(**keywords): ...\n"
KINDS = {
    "reward": (resolve_reward, reward_names, REWARD.format("reward") + REWARD.format("Other")),
    "environment": (
        resolve_environment,
        environment_names,
        ENVIRONMENT.format("Environment") + ENVIRONMENT.format("Other"),
    ),
    "algorithm.name": (load_algorithm, list_algorithms, ALGORITHM),
    "rollout.engine": (
        load_engine,
        engine_names,
        ENGINE.format("build_engine") + ENGINE.format("Other"),
    ),
}
kinds = pytest.mark.parametrize("noun", KINDS)


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A package `outside_plugins` on the Python path, with a module of each kind and broken ones."""
    folder = tmp_path / "outside_plugins"
    folder.mkdir()
    for noun, (_, _, source) in KINDS.items():
        (folder / f"{noun.replace('.', '_')}.py").write_text(source)
    (folder / "empty.py").write_text("")
    (folder / "needs.py").write_text("import no_such_package_x")
    (folder / "raises.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("outside_plugins")]:
        del sys.modules[name]


@kinds
def test_every_plugin_that_comes_with_mrl(noun) -> None:
    load, names, _ = KINDS[noun]
    assert names()
    for name in names():
        assert load(name) is not None


@kinds
def test_one_from_outside_in_every_form(noun, package: Path) -> None:
    load, stem = KINDS[noun][0], noun.replace(".", "_")
    module = importlib.import_module(f"outside_plugins.{stem}")
    names = [n for n in ("reward", "Environment", "build_engine") if hasattr(module, n)]
    default = getattr(module, names[0]) if names else module
    assert (default is module) == (noun == "algorithm.name")
    assert load(f"outside_plugins.{stem}") is default
    assert load(f"outside_plugins.{stem}:Other") is module.Other
    file = package / f"{stem}.py"
    other, whole = load(f"{file}:Other"), load(str(file))
    assert other.__module__ == (whole.__name__ if noun == "algorithm.name" else whole.__module__)
    assert load(f"{file}:Other") is other  # a file is run once
    assert other is not module.Other


@kinds
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("nobody", "'nobody' is not in mrl/{folder}/: expected one of {first}"),
        ("nobody.there", "is not in mrl/{folder}/: expected one of {first}"),
        ("{near}", "did you mean {first!r}?"),
        ("outside_plugins.gone", "is not in mrl/{folder}/: expected one of {first}"),
        (
            "outside_plugins.needs",
            "cannot be imported: ModuleNotFoundError: No module named 'no_s",
        ),
        ("outside_plugins.raises", "cannot be imported: ZeroDivisionError: division by zero"),
        ("outside_plugins.empty:Median", "'Median' in it"),
        ("{package}/gone.py", "no file {package}/gone.py"),
        ("{package}/raises.py", "cannot be imported: ZeroDivisionError"),
        ("{package}/empty.py:", "expected NAME, path/file.py:"),
    ],
)
def test_what_is_not_there_is_one_clear_line(noun, spec, reason, package: Path) -> None:
    load, names, _ = KINDS[noun]
    first = names()[0]
    folder = {"rollout.engine": "engines", "algorithm.name": "algorithms"}.get(noun, f"{noun}s")
    given = {"first": first, "near": first[:-1], "package": package, "folder": folder}
    for _ in range(2):  # a file that failed is not taken for one that has run
        with pytest.raises(InputError) as caught:
            load(spec.format(**given))
        message = str(caught.value)
        assert message.startswith(noun)
        assert reason.format(**given) in message
        assert "\n" not in message


@kinds
def test_an_empty_module_is_no_plugin(noun, package: Path) -> None:
    expected = {
        "reward": "no function 'reward' in it",
        "environment": "no class 'Environment' in it",
        "algorithm.name": "lacks advantages, sequence_weights, loss",
        "rollout.engine": "no class or function 'Engine' or 'build_engine' in it",
    }
    for spec in ("outside_plugins.empty", f"{package}/empty.py"):
        with pytest.raises(InputError, match=expected[noun]):
            KINDS[noun][0](spec)


def test_files_of_one_name_and_their_neighbours(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"neighbour_{name}.py").write_text(f"VALUE = {name!r}")
        for file in ("mine", "also"):
            (tmp_path / name / f"{file}.py").write_text(
                f"from neighbour_{name} import VALUE\n" + REWARD.format("reward")
            )
    rewards = [resolve_reward(f"{tmp_path}/{name}/mine.py") for name in ("one", "two")]
    assert [sys.modules[reward.__module__].VALUE for reward in rewards] == ["one", "two"]
    resolve_reward(f"{tmp_path}/one/also.py")
    assert sys.path.count(f"{tmp_path}/one") == 1
    assert sys.path[-2:] == [f"{tmp_path}/one", f"{tmp_path}/two"]


def test_architectures_come_from_their_folder_alone(package: Path) -> None:
    """The model_type is part of a download; it must not name code."""
    (package / "evil.py").write_text("ARCHITECTURE = None")
    for name in architectures():
        assert load_architecture(name).model_type == name
    for spec in (
        "outside_plugins.evil",
        f"{package}/evil.py",
        f"{package}/evil.py:ARCHITECTURE",
        "",
    ):
        with pytest.raises(InputError, match="expected one of deepseek_v3"):
            load_architecture(spec)
    assert "outside_plugins.evil" not in sys.modules
    with pytest.raises(InputError, match=r"model\.architecture=path/file\.py"):
        load_architecture("gemma2")
