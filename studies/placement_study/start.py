"""This module writes what the runs of a task start from: `... placement_study.start FOLDER KIND`.

FOLDER/KIND is a toy model, after the recipe's supervised steps where it has some, and FOLDER/KIND.jsonl
has the prompts where the study writes them itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mrl.config import load_recipe
from mrl.data.first_char import first_char_rows
from mrl.toy_model import write_toy_model
from studies.placement_study.arms import KINDS, RECIPES

NUM_PROMPTS = 512


def write_kind(folder: Path, name: str) -> None:
    """Write model and prompts of a task; the model last, which tells that both are whole."""
    from benchmarks.start_model import write_start

    kind = KINDS[name]
    if kind.prompt_len:
        rows = first_char_rows(NUM_PROMPTS, 0, kind.prompt_len)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if load_recipe(RECIPES / kind.recipe).sft is not None:
        write_start(folder / name, folder / f"{name}.sft", RECIPES / kind.recipe, {})
    else:
        write_toy_model(folder / f"{name}.new")
        (folder / f"{name}.new").rename(folder / name)


if __name__ == "__main__":
    write_kind(Path(sys.argv[1]), sys.argv[2])
