"""The tracker for Weights & Biases: the service, or files in OUTPUT_DIR/wandb/ (offline).

A resumed run keeps its id. The metric `step` is the axis of all charts, because wandb's own step
counter cannot go back.

- Offline, every start of the run writes a new file (a segment) with all steps, and renames the
  files of earlier starts, so that `wandb sync` uploads each step of metrics.jsonl once.
- Online, or if one of the offline files was already uploaded, repeated steps are logged again, and
  the later row of a step counts.
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
    """One run of wandb."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wandb_run: Any = None
        self._samples: dict[str, Any] = {}
        """The table of samples that the next call of `log` sends; {} without a table."""

    @staticmethod
    def packages(config: LoggingConfig) -> Sequence[str]:
        return ("wandb",)

    def start(self, run_id: str | None, next_step: int) -> Started:
        wandb: Any = import_module("wandb")  # `import` would find this file

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
        """Rename the segments of earlier starts, so that `wandb sync` does not find them. Return True.

        If one of the segments was already uploaded, nothing is renamed and False is returned, because
        a new segment with all steps would repeat steps that the service already has.
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
        wandb: Any = import_module("wandb")  # `import` would find this file

        data = [[step, *(_cell(row.get(key)) for key in SAMPLE_COLUMNS)] for row in rows]
        self._samples = {"samples": wandb.Table(columns=["step", *SAMPLE_COLUMNS], data=data)}

    def flush(self) -> None:
        """Do nothing: a process of W&B writes and sends the data, and one cannot wait for it."""

    def close(self, *, failed: bool) -> None:
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=int(failed))


def _cell(value: Any) -> Any:
    """Convert a value for a cell of a table, because all values of a column must have the same type.

    Numbers and None are returned unchanged. All other values become strings, for example chat
    prompts, which are lists.
    """
    return value if isinstance(value, (int, float)) or value is None else str(value)
