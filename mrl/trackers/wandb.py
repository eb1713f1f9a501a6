"""This tracker sends a run to Weights & Biases, or writes it to OUTPUT_DIR/wandb/ (offline).

The id of the run is kept over resumes. `step` is the axis of all charts, as the service's own counter
cannot go back.

- Offline, every start writes one new segment with all steps, and the segments before it are put aside:
  `wandb sync` then uploads what metrics.jsonl holds, each step once.
- Online, and where a segment was uploaded already, the repeated steps are logged again, and the later
  row of a step counts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from mrl.config import LoggingConfig
from mrl.trackers.base import SAMPLE_COLUMNS, Run, Started

OFFLINE = ("offline", "dryrun")
INIT_TIMEOUT_S = 90


class Tracker:
    """Holds one run of wandb."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wandb_run: Any = None
        self._samples: dict[str, Any] = {}
        """The table of the step that is logged next."""

    @staticmethod
    def packages(config: LoggingConfig) -> Sequence[str]:
        return ("wandb",)

    def start(self, run_id: str | None, next_step: int) -> Started:
        wandb: Any = import_module("wandb")  # this file has the same name

        config = self._run.config
        mode = config.wandb_mode or os.environ.get("WANDB_MODE", "online")
        run_id = run_id or secrets.token_hex(4)
        if mode in OFFLINE and self._put_aside(run_id):
            next_step = 0
        self._wandb_run = wandb.init(
            project=config.project,
            entity=config.wandb_entity,
            name=self._run.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(self._run.folder),
            config=dict(self._run.recipe),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", quiet=True, login_timeout=1, init_timeout=INIT_TIMEOUT_S
            ),
        )
        self._wandb_run.define_metric("*", step_metric="step")
        return Started(run_id, next_step)

    def _put_aside(self, run_id: str) -> bool:
        """Rename the segments of former starts, so that `wandb sync` does not find them.

        Returns False, and leaves everything, where one of them was uploaded: a segment with all steps
        would then repeat what the service has.
        """
        folder = self._run.folder / "wandb"
        segments = sorted(folder.glob(f"offline-run-*-{run_id}/*.wandb"))
        if any(file.with_suffix(".wandb.synced").exists() for file in segments):
            return False
        for file in segments:
            file.rename(file.with_suffix(".wandb.dropped"))
        return True

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        row = {"step": step, **metrics, **self._samples, "_timestamp": time_s}
        self._samples = {}
        self._wandb_run.log(row)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        wandb: Any = import_module("wandb")  # this file has the same name

        data = [[step, *(_cell(row.get(key)) for key in SAMPLE_COLUMNS)] for row in rows]
        self._samples = {"samples": wandb.Table(columns=["step", *SAMPLE_COLUMNS], data=data)}

    def flush(self) -> None:
        """wandb has a process of its own that writes and sends; it offers nothing to wait for."""

    def close(self, *, failed: bool) -> None:
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=int(failed))


def _cell(value: Any) -> Any:
    """A column of a table has one type: chat prompts, which are lists, become text."""
    return value if isinstance(value, (int, float)) or value is None else str(value)
