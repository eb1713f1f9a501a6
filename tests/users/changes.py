"""Changes of mind: less memory, another learning rate, copies and branches of a run."""

from __future__ import annotations

import json
import shutil
from typing import Any

import torch

from parallel.policy import Policy
from tests.users.things import User, thing

STEPS = ("train.num_steps=3", "checkpoint.save_every=2", "train.num_steps_per_rollout=2")


def rows(user: User, run: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = (user.folder / run / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


@thing(
    "A run that ran out of memory continues with half the micro-batch and less for the engine.",
    wall="A run cannot go on with less memory after running out of it.",
)
def out_of_memory(user: User) -> str:
    whole, steps = Policy.train_step, []

    def train_step(self: Policy, *args: Any) -> Any:
        steps.append(1)
        if len(steps) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(self, *args)

    Policy.train_step = train_step  # the command is a fork of this process
    try:
        printed = user.train("run", *STEPS, code=77)
    finally:
        Policy.train_step = whole
    (last,) = [line for line in printed.splitlines() if line.startswith("mrl: ")]
    assert last.startswith("mrl: the trainer ran out of memory")
    new = ("train.micro_batch_tokens=80", "rollout.mem_fraction_static=0.4")
    assert new[0] in last
    user.mrl("train", user.folder / "run", *new)
    assert [row["step"] for row in rows(user, "run")] == [0, 1, 2]
    changed = rows(user, "run", "history.jsonl")[-1]["changes"]
    assert set(changed) == {"train.micro_batch_tokens", "rollout.mem_fraction_static"}
    return last


@thing(
    "I change the learning rate of a run, am told how, copy the run and branch off it.",
    wall="A copied run folder trains the original, silently.",
)
def change_copy_and_branch(user: User) -> str:
    user.train("run", *STEPS)
    told = user.mrl("train", user.folder / "run", "optimizer.lr=1e-3", code=2).strip()
    assert "optimizer.lr is 0.003 there and 0.001 now (changes only with --allow)" in told
    shutil.copytree(user.folder / "run", user.folder / "copy")
    before = rows(user, "run")
    config = user.mrl("train", user.folder / "copy/config.yaml", "train.num_steps=4", code=2)
    assert f"mrl train {user.folder / 'copy'}" in config
    more = ("train.num_steps=4", "optimizer.lr=1e-3", "--allow", "optimizer.lr")
    user.mrl("train", user.folder / "copy", *more)
    assert [row["lr"] for row in rows(user, "copy")] == [0.003, 0.003, 0.003, 0.001]
    user.mrl("branch", f"{user.folder / 'run'}@2", user.folder / "apart", "optimizer.lr=1e-4")
    user.mrl("train", user.folder / "apart")
    assert [row["lr"] for row in rows(user, "apart")] == [0.003, 0.003, 0.0001]
    assert rows(user, "run") == before
    return told


@thing("I train on other data from here on.")
def other_data(user: User) -> str:
    user.train("run", *STEPS)
    data = user.write("other.jsonl", "".join(f'{{"prompt": "q{i}z"}}\n' for i in range(64)))
    change = (f"data.path={data}", "train.num_steps=4")
    told = user.mrl("train", user.folder / "run", *change, code=2).strip()
    assert "--allow data.path" in told
    user.mrl("train", user.folder / "run", *change, "--allow", "data.path")
    prompts = {row["prompt"] for row in rows(user, "run", "rollouts/step_000003.jsonl")}
    assert prompts <= {f"q{i}z" for i in range(64)}
    return f"step 3 has prompts such as {min(prompts)!r}"


@thing("I move my data; the run continues, as the contents are equal.", is_long=False)
def moved_data(user: User) -> str:
    from mrl.config import load_recipe
    from mrl.run.folder import RunFolder

    rows_ = "".join(f'{{"prompt": "a{i}"}}\n' for i in range(16))
    recipe = load_recipe(user.recipe("run")[0], [
        *user.recipe("run")[1:], f"data.path={user.write('a.jsonl', rows_)}"])  # fmt: skip
    folder = RunFolder(recipe.output_dir)
    folder.open(recipe, folder.check(recipe))
    folder.add_metrics({"step": 0})
    folder.close()
    moved = user.write("elsewhere/b.jsonl", rows_)
    user.mrl("check", folder.root, f"data.path={moved}")
    moved.write_text(rows_ * 2)
    return user.mrl("check", folder.root, f"data.path={moved}", code=2).strip()
