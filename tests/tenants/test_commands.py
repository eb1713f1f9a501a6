"""`mrl tenants`, with a service that runs and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
import yaml

from mrl.cli import main
from mrl.commands.tenants import VARIABLE
from mrl.config import dump_recipe
from mrl.run.folder import RunFolder
from mrl.run.json_lines import add_line
from mrl.service.control import Control
from mrl.service.registry import Registry
from tests.tenants.parts import service, tenant


@pytest.fixture
def control(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("MRL_SERVICE", str(tmp_path / "service"))
    with Registry(service(tmp_path, model)) as registry, Control(registry) as made:
        yield made


def mrl(*words: str) -> None:
    main(["tenants", *words])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command is refused with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        mrl(*words)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mrl: ")
    assert said.err.count("\n") == 1
    return said.err


def write(file: Path, **keys: object) -> None:
    file.write_text(yaml.safe_dump(tenant(Path("runs/first"), **keys)))


def test_from_add_to_remove(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "My Recipe.yaml")
    mrl("add", "My Recipe.yaml", "seed=3", "--weight", "2", "train.num_steps=5")
    assert f"my-recipe is queued; its run folder is {tmp_path / 'runs/first'}" in said(capsys)
    recipe = control.registry.recipe("my-recipe")
    assert (recipe.seed, recipe.train.num_steps) == (3, 5)
    mrl("list")
    assert said(capsys).split("\n")[3].split()[:4] == ["my-recipe", "queued", "0/5", "2"]
    mrl("pause", "my-recipe", "--reason", "later\x1b[2J")
    assert "my-recipe is paused (later\\x1b[2J)" in said(capsys)
    mrl("resume", "my-recipe")
    mrl("status", "my-recipe", "--service", str(tmp_path / "service"))
    assert "0 of 5" in said(capsys)
    mrl("remove", "my-recipe")
    assert "its run stays in" in said(capsys)
    mrl("list")
    assert "there are no tenants; add one: mrl tenants add RECIPE\n" in said(capsys)


@pytest.mark.usefixtures("control")
def test_the_next_command_names_a_service_that_an_option_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine.yaml", output_dir=str(tmp_path / "runs/mine"))
    service = str(tmp_path / "service")
    monkeypatch.delenv(VARIABLE)
    mrl("list", "--service", service)
    assert f"mrl tenants add RECIPE --service {service}" in said(capsys)
    mrl("add", "mine.yaml", "--service", service)
    assert f"mrl tenants status mine --watch --service {service}" in said(capsys)


def test_the_list_says_who_holds_whom_up(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells of the newest 20 rounds alone, and of those that a tenant took part in."""
    for name in ("slow", "quick", "new"):
        write(tmp_path / f"{name}.yaml", output_dir=str(tmp_path / "runs" / name))
        mrl("add", f"{name}.yaml")
    for number in range(40):
        row = {
            "service/slow/swap_s": 1.0,
            "service/slow/update_s": 8.0,
            "service/slow/gate_wait_s": 0.5,
        }
        row |= {"service/slow/queue_age_s": 0.0, "service/quick/swap_s": 0.0}
        row |= {
            "service/quick/update_s": 1.0 if number >= 20 else 500.0,
            "service/quick/queue_age_s": 9.0,
        }
        add_line(tmp_path / "service/metrics.jsonl", {"round": number, **row})
    with (tmp_path / "service/metrics.jsonl").open("a") as file:
        file.write('{"round": 40, "service/quick/upd')
    capsys.readouterr()
    mrl("list")
    rows = [line.split()[5:7] for line in said(capsys).split("\n")[2:6]]
    assert rows == [["trainer", "waits"], ["90%", "0.5s"], ["10%", "9.0s"], ["0%", "-"]]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_add_waits_for_a_service_that_starts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MRL_SERVICE", str(tmp_path / "service"))
    write(tmp_path / "r.yaml")
    assert "it has no service.yaml" in refusal(capsys, "add", "r.yaml", "--wait", "0.1")
    for odd in ("-1", "nan", "inf"):
        assert f"--wait {odd}: expected" in refusal(capsys, "add", "r.yaml", "--wait", odd)
    with ExitStack() as undo:

        def start() -> None:
            undo.enter_context(Control(undo.enter_context(Registry(service(tmp_path, model)))))

        timer = Timer(0.3, start)
        timer.start()
        mrl("add", "r.yaml", "--wait", "60")
        timer.join()
    assert "r is queued" in capsys.readouterr().out


@pytest.mark.usefixtures("control")
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "r.yaml", lora={"rank": 9})
    assert "lora.max_rank=8" in refusal(capsys, "add", "r.yaml")
    assert "give the path of a YAML file" in refusal(capsys, "add", "nothing.yaml")
    assert "the name of a tenant is 'A'" in refusal(capsys, "add", "r.yaml", "--name", "A")
    assert "unknown key 'lora.rnk'" in refusal(capsys, "add", "r.yaml", "lora.rnk=3")
    assert "expected key=value" in refusal(capsys, "add", "r.yaml", "lora")
    assert "has a value that no key accepts" in refusal(capsys, "add", "r.yaml", "seed=2026-01-01")
    assert "there is no tenant 'x'; there are: none" in refusal(capsys, "status", "x")
    assert "the name of a tenant is '../x'" in refusal(capsys, "remove", "../x")
    assert "is not the folder of a service" in refusal(capsys, "list", "--service", str(tmp_path))


def test_a_run_of_its_own_joins_a_service(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.yaml has all keys; those that may change freely become the service's."""
    write(tmp_path / "r.yaml")
    mrl("add", "r.yaml", "--name", "before")
    recipe = control.registry.recipe("before")
    engine = recipe.rollout.model_copy(update={"max_total_tokens": 77})
    (tmp_path / "runs/alone").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "runs/alone" / name).touch()
    alone = {"rollout": engine, "output_dir": str(tmp_path / "runs/alone")}
    dump_recipe(recipe.model_copy(update=alone), tmp_path / "runs/alone/config.yaml")
    mrl("add", "runs/alone")
    mrl("remove", "alone")
    mrl("add", "runs/alone/config.yaml", "--name", "again")
    assert control.registry.recipe("again").rollout.max_total_tokens == 4096
    dump_recipe(recipe.model_copy(update=alone), tmp_path / "copy.yaml")
    assert "max_total_tokens is 77 and 4096" in refusal(capsys, "add", "copy.yaml")


def test_watching_ends_with_the_tenant(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "r.yaml")
    mrl("add", "r.yaml")
    control.registry.move("r", "running")
    folder = RunFolder(tmp_path / "runs/first")
    folder.root.mkdir(parents=True)
    for step in range(2):
        folder.add_metrics({"step": step, "reward/mean": 0.25 + step})
    control.registry.move("r", "paused", "its reward\nraised")
    capsys.readouterr()
    mrl("status", "r", "--watch")
    out = said(capsys)
    assert "2/3" in out
    assert "1.2500" in out
    assert out.endswith("r is paused: its reward raised\n")


def test_without_a_service_the_folder_is_read(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "r.yaml")
    mrl("add", "r.yaml")
    control.close()
    capsys.readouterr()
    for words in (["list"], ["status", "r"], ["status", "r", "--watch"]):
        mrl(*words)
        out = said(capsys)
        assert "stopped" in out
        assert "no service listens in" in out
        assert "start it again: mrl serve" in out
        assert out.endswith("the tenants shown are those on disk\n")
    assert "has no tenant 'x'" in refusal(capsys, "status", "x")
    for words in (
        ["add", "r.yaml", "--name", "s"],
        ["pause", "r"],
        ["resume", "r"],
        ["remove", "r"],
    ):
        assert "no service listens in" in refusal(capsys, *words)
    state = json.loads((tmp_path / "service/tenants/r/state.json").read_text())
    assert state["state"] == "queued"


def test_which_service_has_to_be_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MRL_SERVICE", raising=False)
    assert "give --service FOLDER" in refusal(capsys, "list")


BEFORE_CALLERS = """
import sys
from mrl.cli import main
from mrl.service import control

def listen(registry):
    print("ready:", "AutoTokenizer" in dir(sys.modules.get("transformers")))
    raise KeyboardInterrupt

control.Control = listen
main(["serve", "service.yaml"])
"""


def test_a_service_has_imported_transformers_before_it_listens(tmp_path: Path, model: Path) -> None:
    """A caller's thread that imports it beside the start would end the start by an ImportError."""
    dump_recipe(service(tmp_path, model), tmp_path / "service.yaml")
    words, home = [sys.executable, "-c", BEFORE_CALLERS], Path(__file__).parents[2]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120, check=False)
    done = run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(home)})
    assert "ready: True" in done.stdout, done.stdout + done.stderr
