"""The runs of the study so far, as they are committed: another machine continues from them.

One file a model, benchmarks/results/NAME_runs.json.gz, with the settings of the study, its calibration
and every finished run, step by step.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import RESULTS
from studies.stability_study.jobs import read_lines


def file_of(name: str) -> Path:
    return RESULTS / f"{name}_runs.json.gz"


def keep(folder: Path, name: str) -> Path:
    """Write the runs of a study's folder to the committed file. Returns the file."""
    content = {
        "settings": json.loads((folder / "settings.json").read_text()),
        "calibration": json.loads((folder / "calibration.json").read_text()),
        "results": read_lines(folder / "results.jsonl"),
    }
    file = file_of(name)
    file.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    return file


def continue_kept(folder: Path, name: str) -> None:
    """Put the committed runs and calibration into a study's folder that has no runs. Exits if the
    committed runs were made with other settings."""
    lines = folder / "results.jsonl"
    if lines.exists() or not file_of(name).exists():
        return
    content: dict[str, Any] = json.loads(gzip.decompress(file_of(name).read_bytes()))
    if content["settings"] != json.loads((folder / "settings.json").read_text()):
        sys.exit(
            f"error: {file_of(name).name} holds runs of other settings; give another --folder, "
            "or --fresh"
        )
    (folder / "calibration.json").write_text(json.dumps(content["calibration"], indent=1))
    lines.write_text("".join(json.dumps(result) + "\n" for result in content["results"]))
    print(f"continues from {len(content['results'])} committed runs", flush=True)


def digest_of(model: Path) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a model folder's weights."""
    found = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
