"""All runs start from FOLDER/start; `python -m studies.stability_study.start FOLDER` writes it.

It is a toy model with more experts than the demo's, after the recipe's supervised steps, as a Hugging
Face folder in float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.start_model import write_start
from studies.stability_study.arms import RECIPE, SHAPE

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_start(folder / "start", folder / "sft", RECIPE, SHAPE)
