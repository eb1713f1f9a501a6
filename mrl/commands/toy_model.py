"""`mrl toy-model DIR` writes a tiny MoE model with random weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "toy-model",
        help="write a tiny Qwen3-MoE model with random weights",
        description="Write a tiny Qwen3-MoE model with random weights and a character tokenizer, as a "
        "Hugging Face folder. One CPU core can train it.",
    )
    command.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="a new or empty folder, or an earlier toy model to replace",
    )
    command.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from mrl.toy_model import write_toy_model

    write_toy_model(args.folder, seed=args.seed)
    print(f"wrote a toy Qwen3-MoE to {args.folder}")
