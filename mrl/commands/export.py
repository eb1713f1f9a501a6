"""`mrl export RUN_OR_CKPT DIR` writes a checkpoint as a Hugging Face folder or a PEFT folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder",
        description="Write a checkpoint as a Hugging Face folder: safetensors, config.json, tokenizer "
        "and a model card. That of a LoRA adapter becomes PEFT's folder of the adapter, or, with "
        "--merged, the whole model. Neither GPUs nor the layout of the run are needed.",
    )
    command.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_CKPT",
        help="output_dir of a run (its newest checkpoint), or one of its checkpoints/iter_*",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    command.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="folder of the base model, for its tokenizer, and for its weights with --merged; by "
        "default where the run had it",
    )
    command.add_argument(
        "--merged",
        action="store_true",
        help="add the update of a LoRA adapter to the weights of its base, and write the whole model",
    )
    command.add_argument(
        "--architecture",
        metavar="FILE",
        help="where the run's model.architecture is now; by default where the run had it",
    )
    command.add_argument(
        "--max-shard-size-mb",
        type=int,
        default=2048,
        metavar="MB",
        help="largest safetensors file in MiB (default 2048)",
    )
    command.add_argument(
        "--quantization",
        choices=("none", "fp8_block", "fp8_block_ue8m0"),
        default="none",
        help="store the matrices of attention, MLPs and experts in fp8 blocks of 128 x 128, "
        "DeepSeek-V3's format, with float32 scales or powers of two (default none)",
    )
    command.set_defaults(run=run, only_reads=True)


def run(args: argparse.Namespace) -> None:
    from mrl.commands.export_checkpoint import export

    export(
        args.source,
        args.folder,
        args.model,
        args.max_shard_size_mb,
        args.architecture,
        merged=args.merged,
        quantization=args.quantization,
    )
