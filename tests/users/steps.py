"""What a run shows and prints: step numbers, the next command, its page, its paths."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from tests.loop.conftest import REPOSITORY, TOY_RECIPE
from tests.users.things import User, thing

DATA = REPOSITORY / "launch/recipes/data/first_char.jsonl"


def shown(page: Path) -> dict[str, Any]:
    """Return the data that a page draws."""
    (data,) = re.findall(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(data)


@thing(
    "I look for one step in the terminal, metrics, files, why, page and checkpoints.",
    wall="Step numbers differ by one between the terminal and `mrl why`.",
)
def one_step_number(user: User) -> str:
    run = user.folder / "run"
    printed = user.train("run", "train.num_steps=2", "checkpoint.save_every=1")
    terminal = [(int(n), int(last)) for n, last in re.findall(r"^ +(\d+)/(\d+) ", printed, re.M)]
    assert terminal == [(0, 1), (1, 1)], printed
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    # Step 1 was sampled by the weights after one step, which are the first checkpoint.
    assert [row["weight_version"] for row in rows] == [0, 1]
    saved = sorted(folder.name for folder in (run / "checkpoints").glob("iter_*"))
    assert saved == ["iter_0000001", "iter_0000002"]
    for folder, suffix in (("rollouts", "jsonl"), ("tokens", "safetensors")):
        files = {file.name for file in (run / folder).glob(f"step_*.{suffix}")}
        assert files == {f"step_{n:06d}.{suffix}" for n in (0, 1)}, folder
    why = json.loads(user.mrl("why", run, "1", "--json"))
    assert why["step"] == 1
    assert "step 2" in user.mrl("why", run, "2", code=2)
    user.mrl("view", run)
    page = shown(run / "view.html")
    assert page["metrics"]["steps"] == [step["step"] for step in page["steps"]] == [0, 1]
    resumed = user.mrl("train", run, "train.num_steps=3")
    assert re.findall(r"^ +(\d+)/(\d+) ", resumed, re.M) == [("2", "2")], resumed
    return "steps 0 and 1 everywhere; the resumed run continues with 2 of 0 to 2"


@thing("I make the toy model and check the shipped recipe as it is, without overrides.")
def check_without_overrides(user: User) -> str:
    user.mrl("toy-model", "toy/model")
    printed = user.mrl("check", TOY_RECIPE)
    assert printed.endswith("ok\n")
    assert "first_char.jsonl: 512 prompts" in " ".join(printed.split())
    assert not (user.folder / "runs").exists()
    return printed.strip().splitlines()[-1]


@thing("I paste the command that a run prints at its end, and it trains on.")
def paste_the_next_command(user: User) -> str:
    printed = user.train("run", "train.num_steps=1", COLUMNS="1000")
    (line,) = [line for line in printed.splitlines() if line.startswith("next")]
    words = shlex.split(line.removeprefix("next"))
    assert words[1:4] == ["-m", "mrl", "train"] or words[0].endswith("mrl"), line
    user.mrl(*words[words.index("train") :])
    steps = len((user.folder / "run/metrics.jsonl").read_text().splitlines())
    assert steps > 1
    return f"{line.strip()}: {steps} steps"


@thing("I start a run with relative paths, and check its config from another directory.")
def paths_hold_anywhere(user: User) -> str:
    shutil.copy(DATA, user.folder / "rows.jsonl")
    user.write("mine.py", "def f(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    relative = ("data.path=rows.jsonl", "reward=mine.py:f", "output_dir=run", "train.num_steps=1")
    user.mrl("train", *user.recipe("run", *relative), "algorithm.entropy_coef=1")
    elsewhere = User(user.folder / "elsewhere", user.toy)
    elsewhere.folder.mkdir()
    printed = elsewhere.mrl("check", "../run/config.yaml")
    assert str(user.folder / "rows.jsonl") in "".join(printed.split())
    assert f"{user.folder / 'mine.py'}:f" in "".join(printed.split())
    return "data, reward and run folder are found"


@thing("I copy a finished run, and read its page: samples, units, speed and the time of the run.")
def read_the_page(user: User) -> str:
    run, copy = user.folder / "run", user.folder / "copy"
    user.train("run", "train.num_steps=2")
    shutil.copytree(run, copy)
    os.utime(copy / "metrics.jsonl", (0, 0))
    states = []
    for folder in (run, copy):
        user.mrl("view", folder)
        text = (folder / "view.html").read_text()
        states.append(re.findall(r"finished: 2 of 2 steps, the last at [^<]+", text))
    assert states[0] == states[1] != []
    page = shown(copy / "view.html")
    sample = page["steps"][0]["samples"][0]
    lines = (run / "rollouts/step_000000.jsonl").read_text().splitlines()
    assert any(json.loads(line)["prompt"] in sample["text"] for line in lines), sample["text"]
    units = page["metrics"]["units"]
    assert set(units) == set(page["metrics"]["series"])
    assert "value" not in units.values()  # every key of a run has a unit
    assert units["throughput/step_tokens_per_s"] == "tokens/s"
    text = (copy / "view.html").read_text()
    assert "Tokens per second" in text
    assert "Truncated share of the responses" in text
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    assert headings
    assert not any("_" in heading for heading in headings), headings
    return f"{states[1][0]}; {len(units)} keys with units; headings {', '.join(headings)}"
