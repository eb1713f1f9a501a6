"""`mrl export RUN_OR_CKPT DIR` writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    command = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    command.add_argument(
        "source", type=Path, metavar="RUN_OR_CKPT", help="output_dir, or an iter_*"
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    command.add_argument("--model", type=Path, metavar="PATH", help="base model with the tokenizer")
    command.add_argument("--max-shard-size-mb", type=int, default=2048, metavar="MB")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from mrl.commands.export_checkpoint import export

    export(args.source, args.folder, args.model, args.max_shard_size_mb)
