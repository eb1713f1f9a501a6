"""What mrl check finds before a run, and what is not finite within one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mrl.algorithms import gspo
from mrl.data.first_char import first_char_rows
from mrl.types import LossOutput
from tests.users.things import User, thing

FILE = "model.safetensors"


def copied(user: User) -> Path:
    """Copy the toy model, to be damaged."""
    return Path(shutil.copytree(user.toy.model, user.folder / "damaged", dirs_exist_ok=True))


def refused(user: User, *more: str) -> str:
    """Check the recipe and return the one line that refuses it."""
    printed = user.mrl("check", *user.recipe("run"), *more, code=2).strip()
    assert "Traceback" not in printed
    assert len([line for line in printed.splitlines() if line.startswith("mrl: ")]) == 1
    return " ".join(printed.split())


@thing(
    "My download of the model stopped in the middle, or a link points to nothing.",
    is_long=False,
    wall="A truncated safetensors file or a dangling link ends in a traceback.",
)
def truncated_model(user: User) -> str:
    folder = copied(user)
    content = (folder / FILE).read_bytes()
    for size in (len(content) // 2, 100):  # in the numbers, and in the header
        (folder / FILE).write_bytes(content[:size])
        said = refused(user, f"model.path={folder}")
        assert f"{folder / FILE} is no whole safetensors file" in said
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("/nowhere/blob")
    assert "is a link to /nowhere/blob, which is not there" in refused(user, f"model.path={folder}")
    return said


@thing(
    "A tensor of my model is missing, has another shape, or is full of NaN.",
    wall="mrl check says ok to a model with a missing tensor, a wrong shape or NaN weights.",
)
def damaged_tensors(user: User) -> str:
    folder, name = copied(user), "model.layers.1.mlp.gate.weight"
    whole = load_file(folder / FILE)
    said = ""
    for new, words in (
        (None, f"has no tensor {name}"),
        (whole[name][:, :-2].contiguous(), f"{name} is 8 x 62, but config.json means 8 x 64"),
        (torch.full_like(whole[name], torch.nan), f"{name} holds nan"),
    ):
        rest = {key: value for key, value in whole.items() if key != name}
        save_file(rest | ({} if new is None else {name: new}), folder / FILE)
        said = refused(user, f"model.path={folder}")
        assert words in said
    save_file(whole, folder / FILE)
    recipe = [*user.recipe("run"), f"model.path={folder}"]
    assert user.mrl("check", *recipe, "--deep").endswith("ok\n")
    return said


@thing(
    "I edit config.json so that it fits no model.",
    wall="num_experts_per_tok above the experts passes the check and dies after a minute.",
)
def edited_config(user: User) -> str:
    folder = copied(user)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_experts_per_tok": 99}))
    assert "routes a token to 99 experts, but has 8" in refused(user, f"model.path={folder}")
    file.write_text(json.dumps(config | {"num_attention_heads": 8}))
    said = refused(user, f"model.path={folder}")
    assert "q_proj.weight is 64 x 64, but config.json means 128 x 64" in said
    return said


@thing(
    "My rows hold half of a surrogate pair, a key twice, NaN where the answer belongs, and copies.",
    is_long=False,
    wall="A lone surrogate ends in a TypeError without the row; copies and NaN pass without a word.",
)
def odd_rows(user: User) -> str:
    rows = [json.dumps(row | {"answer": "a"}) for row in first_char_rows(16, 0)]
    cases = {
        '{"prompt": "a\\ud800b", "answer": "a"}': ":17: a string contains \\ud800",
        '{"prompt": "a", "prompt": "b"}': ":17: the key `prompt` occurs twice",
        '{"prompt": "a b", "answer": NaN}': ":17: the column `answer`, which the reward",
    }
    for row, words in cases.items():
        file = user.write("rows.jsonl", "\n".join([*rows, row]))
        said = refused(user, f"data.path={file}", "reward=exact_match")
        assert f"{file}{words}" in said
    file = user.write("rows.jsonl", "\n".join([*rows, rows[2]]))
    told = " ".join(user.mrl("check", *user.recipe("run"), f"data.path={file}").split())
    assert f"{file}:17 is the same row as {file}:3, and 1 of 17 rows are such copies" in told
    return said


def not_finite(*args: Any, **more: Any) -> LossOutput:
    """Return a loss whose gradient is NaN."""
    return LossOutput(args[0].sum() * torch.nan)


@thing("Every gradient of my run is NaN: it skips three steps and ends with exit code 76.")
def nan_gradients(user: User) -> str:
    whole, gspo.loss = gspo.loss, not_finite  # the command is a fork of this process
    try:
        printed = user.train("run", "train.num_steps=5", code=76)
    finally:
        gspo.loss = whole
    said = " ".join(printed.split())
    assert "step 1: " in said
    assert "is skipped and changes nothing, 2 in a row (guards.max_nonfinite_steps=3 ends" in said
    (last,) = [line for line in printed.splitlines() if line.startswith("mrl: ")]
    assert "3 optimizer step(s) of the policy in a row were not finite and changed nothing" in last
    assert "exit code 76: losses, log-probs or gradients were not finite" in printed
    lines = (user.folder / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/nonfinite_steps"] for line in lines] == [1, 1]
    return last


@thing("A tensor does not fit into the host's memory in training.")
def host_out_of_memory(user: User) -> str:
    whole = gspo.loss
    gspo.loss = lambda *args, **more: LossOutput(torch.empty(1 << 50).sum())
    try:
        printed = user.train("run", "train.num_steps=2", code=77)
    finally:
        gspo.loss = whole
    (last,) = [line for line in printed.splitlines() if line.startswith("mrl: ")]
    assert "ran out of memory in phase train" in last
    assert "Rank 0 holds: weights " in last
    assert "Change train.micro_batch_tokens=80 (160 now) and train.recompute=true" in last
    return last
