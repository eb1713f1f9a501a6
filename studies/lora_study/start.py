"""This module writes the models that the runs start from: `... lora_study.start FOLDER`.

FOLDER/base is a toy model that has learned to repeat *some* letter of the prompt: supervised steps
train all of its weights on demonstrations, each of which repeats a letter that chance picked. The task
of the study asks for the first letter, which is no more frequent there than any other. Its output layer
and its final norm, which stay frozen under LoRA, are those of a trained model, as with every base that
LoRA is meant for. FOLDER/large is a larger toy model, as random as it was made.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import sys
from pathlib import Path

import yaml

from mrl.toy_model import write_toy_model
from studies.lora_study.arms import LARGE, LARGE_SHAPE, RECIPE

NUM_DEMONSTRATIONS, PROMPT_LEN, ANSWER_LEN = 8192, 16, 32
SFT = {"num_steps": 300, "batch_size": 64, "lr": 3e-3}


def demonstrations(num: int) -> list[dict[str, str]]:
    """Return `num` prompts of random letters, each with one of its letters repeated."""
    chance = random.Random("demonstrations of lora_study")
    rows = []
    for _ in range(num):
        prompt = "".join(chance.choices(string.ascii_lowercase, k=PROMPT_LEN))
        rows.append({"prompt": prompt, "completion": chance.choice(prompt) * ANSWER_LEN})
    return rows


def write_models(folder: Path) -> None:
    """Write both models; the base last, which tells that both are whole."""
    from benchmarks.start_model import write_start

    folder.mkdir(exist_ok=True)
    write_toy_model(folder / LARGE, **LARGE_SHAPE)
    data, recipe = folder / "demonstrations.jsonl", folder / "recipe.yaml"
    lines = [json.dumps(row) + "\n" for row in demonstrations(NUM_DEMONSTRATIONS)]
    data.write_text("".join(lines))
    tree = yaml.safe_load(RECIPE.read_text()) | {"sft": {"path": str(data), **SFT}}
    recipe.write_text(yaml.safe_dump(tree))
    write_start(folder / "base", folder / "sft", recipe, {})
    shutil.rmtree(folder / "sft")


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
