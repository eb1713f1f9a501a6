"""The tracker for TensorBoard, which writes event files into OUTPUT_DIR/tensorboard/.

TensorBoard stores 32-bit floats. If a resumed run repeats steps, its new event file marks the older
values as purged, and TensorBoard does not show them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mrl.config import LoggingConfig
from mrl.trackers.base import Run, Started


class Tracker:
    """Writes TensorBoard event files, one new file per start."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None

    @staticmethod
    def packages(config: LoggingConfig) -> Sequence[str]:
        return ("tensorboard",)

    def start(self, run_id: str | None, next_step: int) -> Started:
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = None if run_id is None else next_step
        self._writer = SummaryWriter(str(self._folder), purge_step=purge)
        if run_id is None:
            text = yaml.safe_dump(dict(self._run.recipe), sort_keys=False)
            self._writer.add_text("recipe", textwrap.indent(text, "    "), 0)
        return Started(self._folder.name, next_step)

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step, walltime=time_s)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        # TensorBoard renders Markdown. Indentation turns prompts and completions into code blocks.
        parts = []
        for row in rows:
            short = {key: row[key] for key in row if key not in ("prompt", "completion")}
            parts.append(", ".join(f"{key}: {value}" for key, value in short.items()))
            for key in ("prompt", "completion"):
                text = "\n".join(str(row.get(key)).splitlines() or [""])
                parts.append(f"{key}:\n\n{textwrap.indent(text, '    ', lambda line: True)}")
        self._writer.add_text("samples", "\n\n".join(parts), step, walltime=time_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
