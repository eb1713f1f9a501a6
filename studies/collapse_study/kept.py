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
from mrl.system.files import write_whole
from studies.stability_study.jobs import read_lines


def file_of(name: str) -> Path:
    return RESULTS / f"{name}_runs.json.gz"


def kept(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the `settings`, the `calibration` and the finished runs (`results`) of a study's folder.

    Exits if the folder has no finished run, or runs of other settings than `settings`.
    """
    for needed in ("settings.json", "calibration.json"):
        if not (folder / needed).is_file():
            sys.exit(f"error: {folder} holds no study with finished runs: it has no {needed}")
    content = {
        "settings": json.loads((folder / "settings.json").read_text()),
        "calibration": json.loads((folder / "calibration.json").read_text()),
        "results": read_lines(folder / "results.jsonl"),
    }
    if not content["results"]:
        sys.exit(f"error: {folder} holds no study with finished runs")
    if content["settings"] != _as_read(settings):
        sys.exit(f"error: {folder} holds a study of other settings, which no whole study continues")
    return content


def keep(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """Write the runs of a study's folder to the committed file and return it. Exits as `kept` does."""
    content, file = kept(folder, settings), file_of(name)
    write_whole(file, gzip.compress(json.dumps(content).encode(), mtime=0))
    return file


def continue_kept(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Put the committed runs, calibration and settings into the folder of a study with these settings,
    if it has no runs. Exits if the committed runs were made with other settings, and then leaves no
    trace in the folder: a later study could not continue from the committed runs in it."""
    lines, opened = folder / "results.jsonl", folder / "settings.json"
    if lines.exists() or not file_of(name).exists():
        return
    wanted = _as_read(settings)
    if opened.exists() and json.loads(opened.read_text()) != wanted:
        return  # the folder itself is refused
    content: dict[str, Any] = json.loads(gzip.decompress(file_of(name).read_bytes()))
    if content["settings"] != wanted:
        sys.exit(
            f"error: {file_of(name).name} holds runs of other settings; give another --folder, "
            "or --fresh"
        )
    folder.mkdir(parents=True, exist_ok=True)
    opened.write_text(json.dumps(settings, indent=1))  # as `open_results` does
    (folder / "calibration.json").write_text(json.dumps(content["calibration"], indent=1))
    text = "".join(json.dumps(result) + "\n" for result in content["results"])
    write_whole(lines, text.encode())
    print(f"continues from {len(content['results'])} committed runs", flush=True)


def _as_read(settings: dict[str, Any]) -> Any:
    """Return settings as JSON gives them back, with lists for tuples."""
    return json.loads(json.dumps(settings))


def digest_of(model: Path) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a model folder's weights."""
    found = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
