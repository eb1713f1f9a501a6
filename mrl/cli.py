"""The command line. Exit codes: 0 done, 2 bad input (one clear line), 130 Ctrl-C, 1 anything else."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from mrl import __version__
from mrl.config import Recipe, load_recipe
from mrl.console import escape
from mrl.errors import InputError, RunFailed
from mrl.processes import die_with_parent
from mrl.run_folder import RunFolder


def main(argv: list[str] | None = None) -> None:
    """Entry point of `mrl` and `python -m mrl`."""
    args = _parse(argv)
    try:
        args.run(args)
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        print(
            f"mrl: {'' if rank == '0' else f'[rank {rank}] '}{escape(str(error))}", file=sys.stderr
        )
        sys.exit(2)
    except RunFailed as error:
        print(f"mrl: {escape(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: interrupted; {args.after_interrupt}", file=sys.stderr)
        sys.exit(130)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """As argparse does, and `key=value` may also come after options."""
    parser = _parser()
    parser.set_defaults(after_interrupt="nothing is left half done")
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


class _Parser(argparse.ArgumentParser):
    """Bad input is one line."""

    def error(self, message: str) -> NoReturn:
        print(f"mrl: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mrl", description="MoE reinforcement learning")
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    toy = commands.add_parser("toy-model", help="write a tiny Qwen3-MoE checkpoint")
    toy.add_argument("folder", type=Path)
    toy.add_argument("--seed", type=int, default=0)
    toy.set_defaults(run=_toy_model)

    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    export.add_argument("source", type=Path, metavar="RUN_OR_CKPT", help="output_dir, or an iter_*")
    export.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    export.add_argument("--model", type=Path, metavar="PATH", help="base model with the tokenizer")
    export.add_argument("--max-shard-size-mb", type=int, default=2048, metavar="MB")
    export.set_defaults(run=_export)

    for name, text, run in (
        ("check", "validate a recipe and print the plan", _check),
        ("train", "train; starts again where an interrupted run stopped", _train),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("recipe", type=Path, help="YAML file")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="e.g. optimizer.lr=1e-6"
        )
        command.set_defaults(run=run)
        if run is _train:
            command.set_defaults(after_interrupt="start again to go on from the last checkpoint")
        if run is _check:
            _add_plan_options(command)
    return parser


def _add_plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--plan",
        action="store_true",
        help="memory, traffic and estimated time of a step; config.json of the model is enough",
    )
    command.add_argument("--gpus", type=int, help="ranks of the plan; by default this start's")
    command.add_argument("--gpu", help="h100 (default) or h200")
    command.add_argument(
        "--prompt-len", type=int, help="tokens of a prompt in the plan; by default 512"
    )


def _toy_model(args: argparse.Namespace) -> None:
    from mrl.toy_model import write_toy_model

    write_toy_model(args.folder, seed=args.seed)
    print(f"wrote a toy Qwen3-MoE to {args.folder}")


def _export(args: argparse.Namespace) -> None:
    from mrl.export import export

    export(args.source, args.folder, args.model, args.max_shard_size_mb)


def _check(args: argparse.Namespace) -> None:
    recipe = load_recipe(args.recipe, args.overrides)
    from mrl import console
    from parallel.versions import version_rows

    console.table("Versions", ("package", "version", "what it implies"), version_rows())
    if args.plan:
        from mrl.plan import show_plan

        show_plan(recipe, args.gpus, args.gpu, args.prompt_len)
        return
    for name in ("gpus", "gpu", "prompt_len"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is for the plan; add --plan")
    from mrl.preflight import check
    from parallel.groups import world_size

    console.plan(check(recipe, world_size()).rows())
    print("ok")


def _train(args: argparse.Namespace) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a killed torchrun would leave its ranks training
        die_with_parent(os.getppid())
    recipe = load_recipe(args.recipe, args.overrides)
    from parallel.groups import destroy_groups, world_size

    train(recipe, world_size())
    destroy_groups()


def train(recipe: Recipe, world: int) -> None:
    """Check, start and run a recipe on this rank of `world`."""
    from mrl import console
    from mrl.preflight import check
    from parallel import prepare

    plan = check(recipe, world)
    folder = RunFolder(recipe.output_dir)
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        folder.open(recipe)
        console.plan(plan.rows())
    if plan.resume_step is not None and plan.resume_step >= recipe.train.num_steps:
        if is_main:
            print(
                f"{folder.root} is done: {plan.resume_step} of {recipe.train.num_steps} steps, by the "
                "sizes of the files (mrl export reads every byte)"
            )
        return
    prepare()
    from mrl.trainer import Trainer
    from parallel.groups import init_groups

    # Ranks wait for each other while one of them waits for its engine.
    longest_s = max(recipe.rollout.start_timeout_s, 3 * recipe.rollout.request_timeout_s)
    groups = init_groups(plan.dims, recipe.seed, timeout_s=longest_s + 600)
    Trainer(plan, groups, folder).train()
    if is_main:
        _summarize(folder, recipe)


def _summarize(folder: RunFolder, recipe: Recipe) -> None:
    from mrl import console

    rewards = [row["reward/mean"] for row in folder.read_metrics()]
    scored = [row for row in folder.read_rollouts(len(rewards) - 1) if row["reward"] is not None]
    by_reward = sorted(scored, key=lambda row: row["reward"])
    console.summary(
        [float("nan") if reward is None else reward for reward in rewards],
        by_reward[-1] if scored else {},
        by_reward[0] if scored else {},
        folder.root,
        f"{_program()} train {folder.config} train.num_steps={2 * recipe.train.num_steps}",
    )


def _program() -> str:
    """How this program was called, so that the next command can be pasted."""
    called = Path(sys.argv[0])
    return (
        os.path.relpath(called) if called.name == "mrl" else f"{Path(sys.executable).name} -m mrl"
    )


if __name__ == "__main__":
    main()
