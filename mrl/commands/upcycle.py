"""`mrl upcycle SRC DIR` turns a dense model into a mixture of experts with the same outputs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
"""The largest difference between two log-probs that rounding can explain. The models are in fp64,
but transformers still computes norms and routers in fp32."""


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "upcycle",
        help="write a dense model as a mixture of experts that computes the same function",
        description="Write a dense Hugging Face model as a mixture of experts (sparse upcycling): "
        "each expert starts as a copy of the MLP, or of a slice of it, the router is random, and the "
        "log-probs are those of the dense model. It needs no GPU.",
    )
    command.add_argument(
        "source", type=Path, metavar="SRC", help="folder of a dense Llama, Qwen2 or Qwen3 model"
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    command.add_argument(
        "--experts", type=int, required=True, metavar="E", help="experts of each layer"
    )
    command.add_argument(
        "--top-k", type=int, required=True, metavar="K", help="experts that each token uses"
    )
    command.add_argument(
        "--granularity",
        type=int,
        default=1,
        metavar="N",
        help="each expert is one of N slices of the MLP; N must divide E, K and the MLP's width "
        "(default 1)",
    )
    command.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="S",
        help="add noise to each expert, with S times the standard deviation of the weight; the "
        "function then changes (default 0)",
    )
    command.add_argument(
        "--like",
        metavar="ARCH",
        help="model_type of the result: mixtral (default) or qwen2_moe for Llama, qwen2_moe for Qwen2, "
        "qwen3_moe for Qwen3",
    )
    command.add_argument(
        "--seed", type=int, default=0, help="of the router and the noise (default 0)"
    )
    command.add_argument(
        "--max-shard-size-mb",
        type=int,
        default=2048,
        metavar="MB",
        help="largest safetensors file in MiB (default 2048)",
    )
    command.add_argument(
        "--no-check",
        action="store_true",
        help="do not compare log-probs with the dense model, which loads both in fp64, one after the "
        "other",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from mrl.errors import InputError, RunFailed
    from mrl.run import console
    from parallel.upcycle import Upcycling, largest_difference, upcycle

    if args.max_shard_size_mb < 1:
        raise InputError(f"--max-shard-size-mb {args.max_shard_size_mb}: expected at least 1")
    how = Upcycling(args.experts, args.top_k, args.granularity, args.noise, args.like, args.seed)
    with console.progress(f"upcycling {args.source}"):
        moe = upcycle(args.source, args.folder, how, args.max_shard_size_mb << 20)
    width = moe.sizes.moe_ffn_size
    print(
        f"wrote {moe.describe()} to {args.folder}: {how.topk} experts per token, of width {width}"
    )
    if args.no_check:
        return
    with console.progress("comparing log-probs with the dense model"):
        difference = largest_difference(args.source, args.folder)
    if not math.isfinite(difference):
        cause = f"give less than --noise {how.noise:g}" if how.noise else "please report this"
        raise RunFailed(
            f"{args.folder} computes log-probs that are not finite, and {args.source} does not; {cause}"
        )
    print(
        f"log-probs of 64 random tokens differ by {difference:.1e} at most from the dense model's"
    )
    if not how.noise and difference > TOLERANCE:
        raise RunFailed(
            f"{args.folder} does not compute what {args.source} computes: log-probs differ by "
            f"{difference:.1e}, expected at most {TOLERANCE:g}; please report this"
        )
