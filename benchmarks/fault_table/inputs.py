"""Bad inputs: each is refused by `mrl check` with one line, before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.fault_table.base import RECIPE, Toy, command, refused_row
from mrl.drill import Row

OVERRIDES = (
    (15, "typo", "a misspelt key", ["train.num_stepz=3"], "did you mean"),
    (15, "wrong-type", "a word where a number belongs", ["train.num_steps=many"], "'many'"),
    (15, "sizes", "sizes that do not divide", ["parallel.tensor_model_parallel_size=2"],
     "not divisible by tensor 2"),
    (15, "mini-batches", "steps that do not divide the prompts", ["train.num_steps_per_rollout=3"],
     "(4 = 1 x 3 + 1)"),
    (15, "no-model", "a model folder that is not there", ["model.path=/nowhere"], "no folder"),
    (8, "reward-name", "a misspelt reward", ["reward=first_chr"], "did you mean 'first_char'"),
    (8, "reward-file", "a reward file that is not there", ["reward=nowhere.py:f"], "nowhere.py"),
    (12, "no-answer", "exact_match on rows without an answer", ["reward=exact_match"], "answer"),
)  # fmt: skip
ROWS = (
    (12, "broken-json", '{"prompt": "ab"', "not valid JSON"),
    (12, "no-object", '["prompt"]', "expected a JSON object"),
    (12, "no-prompt", '{"answer": "4"}', "no `prompt`"),
    (12, "surrogate", '{"prompt": "a\\ud800b"}', ":7: "),
    (12, "key-twice", '{"prompt": "a", "prompt": "b"}', ":7: "),
    (13, "too-long", json.dumps({"prompt": "a" * 501}), "prompt has 501 tokens"),
)  # fmt: skip


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200_000])


def _cut_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10")


def _dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/nowhere/x")


def _junk(folder: Path) -> None:
    (folder / "junk.safetensors").write_bytes(b"hello world, no tensor")


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return spoil


def _config(**keys: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return spoil


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


NORM = "model.norm.weight"
MODELS = (
    (6, "cut-weights", "weights cut in the middle", _cut, "whole safetensors file"),
    (6, "cut-header", "weights cut in their header", _cut_header, "whole safetensors file"),
    (6, "dangling-link", "weights that are a link to nothing", _dangling, "which is not there"),
    (6, "junk-weights", "a file of junk beside the weights", _junk, "junk.safetensors"),
    (14, "missing-tensor", "weights without the last norm", _tensors(lambda t: t.pop(NORM)), NORM),
    (14, "tensor-shape", "a norm of half its size",
     _tensors(lambda t: t.update({NORM: t[NORM][::2].clone()})), NORM),
    (7, "nan-weights", "weights with NaN",
     _tensors(lambda t: t.update({NORM: t[NORM] * float("nan")})), NORM),
    (14, "experts-per-token", "more experts per token than there are",
     _config(num_experts_per_tok=99), "99 experts"),
    (14, "vocabulary", "config.json with another vocabulary", _config(vocab_size=64), "vocab_size"),
    (14, "no-tokenizer", "no tokenizer", _no_tokenizer, "tokenizer"),
)  # fmt: skip


def rows(toy: Toy) -> Iterator[tuple[int, Row]]:
    """Yield (number of the fault, row) for every bad input."""
    for number, name, did, overrides, named in OVERRIDES:
        said = command("check", RECIPE, *toy.overrides(*overrides))
        yield number, refused_row(name, did, said, named)
    for number, name, row, named in ROWS:
        data = toy.folder / f"{name}.jsonl"
        data.write_text('{"prompt": "a"}\n' * 6 + row + "\n")
        said = command("check", RECIPE, *toy.overrides(f"data.path={data}"))
        yield number, refused_row(name, f"a row of the data: {row[:40]}", said, named)
    for number, name, did, spoil, named in MODELS:
        model = Path(shutil.copytree(toy.model, toy.folder / name))
        spoil(model)
        said = command("check", RECIPE, *toy.overrides(f"model.path={model}"))
        yield number, refused_row(name, did, said, named)
