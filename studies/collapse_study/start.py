"""All runs of a model start from FOLDER/start; `python -m studies.collapse_study.start NAME FOLDER`
writes it.

The toy is a deep toy MoE after the recipe's supervised steps. SmolLM2-135M becomes a MoE whose experts
are copies with noise, and supervised steps on sums, of which one in three is right, train them apart.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.smollm import sums
from benchmarks.start_model import write_after_sft, write_start
from studies.collapse_study.arms import MODELS, ROOT, SFT, SHAPE, SMOLLM, UPCYCLE

RIGHT = 3
"""One answer in so many is right."""


def demonstrations() -> list[dict[str, object]]:
    """Return chats with an answer in the form of the solved example, always the same."""
    drawn = random.Random(0)
    rows = []
    for number, row in enumerate(sums.rows()[sums.NUM_HELD_OUT :]):
        problem = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?")
        answer = int(row["answer"]) + (number % RIGHT > 0) * drawn.choice([-2, -1, 1, 2])
        reply = {"role": "assistant", "content": f"{problem} = {answer}"}
        rows.append({"messages": [*row["prompt"], reply]})
    return rows


def write_smollm(folder: Path) -> None:
    """Make the MoE in FOLDER/sft and train it; FOLDER/start appears when it is complete."""
    scratch = folder / "sft"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    words = ("upcycle", str(SMOLLM / "dense"), str(scratch / "model"), *UPCYCLE)
    subprocess.run([sys.executable, "-W", "ignore", "-m", "mrl", *words], check=True, cwd=ROOT)
    file = scratch / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in demonstrations()))
    sft = ", ".join((f"path: {file}", *SFT))
    model = MODELS["smollm"]
    write_after_sft(folder / "start", scratch, model.recipe, [*model.keys, f"sft={{{sft}}}"])


if __name__ == "__main__":
    name, where = sys.argv[1], Path(sys.argv[2])
    if name == "toy":
        write_start(where / "start", where / "sft", MODELS["toy"].recipe, SHAPE)
    else:
        write_smollm(where)
