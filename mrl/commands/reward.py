"""`mrl reward test SPEC DATA` tries a reward; `mrl reward serve SPEC --port N` serves it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.errors import InputError

MAX_SHOWN = 3
"""Maximum number of findings of each kind that are shown; further findings are only counted."""
SPEC_HELP = "as in a recipe: NAME, FILE.py:FUNC, module:FUNC, http://HOST:PORT or reward_model:DIR"
TIMEOUT_HELP = "time limit of one call in seconds (default 30)"
HOST_HELP = "address to listen on (default 127.0.0.1); others need a token in MRL_REWARD_TOKEN"


def add_to(commands: Any) -> None:
    reward = commands.add_parser(
        "reward",
        help="test a reward function, or serve it over HTTP",
        description="Test a reward function on data, or serve it over HTTP for other machines.",
    )
    actions = reward.add_subparsers(required=True, metavar="ACTION")
    test = actions.add_parser(
        "test",
        help="time a reward and find its faults",
        description="Call a reward with correct and wrong answers to rows of a data set, measure its "
        "time, and report its faults: errors, hangs, wrong values, wrong answers with a high reward.",
    )
    test.add_argument("spec", metavar="REWARD", help=SPEC_HELP)
    test.add_argument(
        "data", type=Path, metavar="DATA", help="a data file with rows as for training"
    )
    test.add_argument(
        "--prompt-key", metavar="COLUMN", help="the column of the prompt, as data.prompt_key"
    )
    test.add_argument(
        "--columns",
        type=_column,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=COLUMN",
        help="new names of columns, as data.columns, e.g. answer=solution",
    )
    test.add_argument(
        "--limit", type=_count, default=100, metavar="N", help="rows to try (default 100)"
    )
    test.add_argument("--timeout", type=_seconds, default=30.0, metavar="S", help=TIMEOUT_HELP)
    test.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="model folder whose tokenizer gives completion_ids; by default they are UTF-8 bytes",
    )
    test.set_defaults(run=run_test)
    serve = actions.add_parser(
        "serve",
        help="serve a reward over HTTP",
        description="Serve a reward over HTTP: a POST request with prompts and completions returns "
        "their rewards. A recipe names the server by its address: reward: http://HOST:PORT.",
    )
    serve.add_argument("spec", metavar="REWARD", help=SPEC_HELP)
    serve.add_argument(
        "--port",
        type=_port,
        required=True,
        metavar="N",
        help="port to listen on; 0 finds a free one",
    )
    serve.add_argument("--host", default="127.0.0.1", help=HOST_HELP)
    serve.add_argument(
        "--workers", type=_count, default=1, metavar="N", help="processes that score (default 1)"
    )
    serve.add_argument("--timeout", type=_seconds, default=30.0, metavar="S", help=TIMEOUT_HELP)
    serve.set_defaults(run=run_serve, after_interrupt="the server has stopped")


def run_serve(args: argparse.Namespace) -> None:
    """Serve the reward. If MRL_REWARD_TOKEN is set, clients must send it."""
    from mrl.rewards.remote import TOKEN_VARIABLE, read_token
    from mrl.rewards.server import RewardServer
    from mrl.system.printable import escape

    token = read_token()
    with RewardServer(
        args.spec,
        args.host,
        args.port,
        num_workers=args.workers,
        timeout_s=args.timeout,
        token=token,
    ) as server:
        same = "" if token is None else f", with the same {TOKEN_VARIABLE}"
        print(f"serving {escape(args.spec)}; in the recipe: reward={server.url}{same}", flush=True)
        server.serve()


def run_test(args: argparse.Namespace) -> None:
    """Test the reward, and exit with 1 if it has faults."""
    from itertools import islice

    from mrl.data.rows import read_prompt_rows
    from mrl.rewards.trial import run_trial
    from mrl.rewards.trial_cases import make_cases
    from mrl.rewards.worker_calls import reward_worker

    rows = read_prompt_rows(args.data, args.prompt_key, dict(args.columns))
    cases = make_cases(list(islice(rows, args.limit)))
    encode = _encoder(args.model)
    worker = reward_worker(args.spec, args.timeout)
    try:
        worker.start()
        trial = run_trial(worker, cases, encode, args.timeout)
    finally:
        worker.close()
    _show(trial, len(cases))
    if trial.findings:
        sys.exit(1)


def _encoder(model: Path | None) -> Callable[[str], list[int]]:
    """Return a function that turns a completion into the token ids of a finished sample.

    The end-of-sequence token is appended, if the tokenizer of the folder `model` has one. If `model`
    is None, the tokens are UTF-8 bytes and the end token is 0. Raises InputError if the folder has no
    tokenizer.
    """
    if model is None:
        return lambda text: [*text.encode(), 0]
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {model}: no tokenizer in it: {error}") from None
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: [*tokenizer.encode(text, add_special_tokens=False), *end]


def _show(trial: Any, num_cases: int) -> None:
    from mrl.rewards.trial import PROBLEMS
    from mrl.run import console

    console.pairs(_figures(trial, num_cases))
    rows: list[tuple[str, ...]] = []
    for kind, text in PROBLEMS.items():
        found = [finding for finding in trial.findings if finding.kind == kind]
        rows += [(kind, text)] if found else []
        rows += [("", f"{f.source or 'all rows'}: {f.detail}") for f in found[:MAX_SHOWN]]
        rows += [("", f"and {len(found) - MAX_SHOWN} more")] if len(found) > MAX_SHOWN else []
    if rows:
        console.table("Problems", ("kind", "what it did, and where"), rows)
    found_kinds = [kind for kind in PROBLEMS if any(f.kind == kind for f in trial.findings)]
    if found_kinds:
        print(f"problems: {', '.join(found_kinds)}")
    else:
        print(f"ok: no problem in {trial.num_rows} rows")


def _figures(trial: Any, num_cases: int) -> list[tuple[str, str]]:
    """Return rows (name, figures) that summarise the trial of the reward."""
    tried = "" if trial.num_rows == num_cases else f" of {num_cases}: stopped after too many hangs"
    rows = [("rows", f"{trial.num_rows}{tried}")]
    if trial.seconds:
        ms = sorted(1000 * second for second in trial.seconds)
        shares = [f"p{share} {ms[-(-len(ms) * share // 100) - 1]:.2f}" for share in (50, 90, 99)]
        rate = len(ms) / sum(trial.seconds)
        rows.append(("calls", f"{len(ms)} with whole rows, {rate:.0f} per second, one at a time"))
        rows.append(("latency in ms", f"{', '.join(shares)}, max {ms[-1]:.2f}"))
    if trial.values:
        low, high = min(trial.values), max(trial.values)
        mean = sum(trial.values) / len(trial.values)
        rows.append(
            ("values", f"{len(trial.values)} from {low:.4g} to {high:.4g}, mean {mean:.4g}")
        )
    if trial.num_unscored:
        rows.append(("without reward", f"{trial.num_unscored} (None: masked)"))
    if trial.num_gold:
        right = ", ".join(f"{name} {count}" for name, count in trial.num_right.items())
        rows.append(("gold highest", f"of {trial.num_gold} rows, written {right}"))
    return rows


def _column(text: str) -> tuple[str, str]:
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COLUMN, such as answer=solution")
    return name, column


def _count(text: str) -> int:
    return _number(text, int, lambda n: n >= 1, "a whole number of at least 1")


def _port(text: str) -> int:
    return _number(text, int, lambda n: 0 <= n <= 65535, "a port, 0 to 65535")


def _seconds(text: str) -> float:
    return _number(text, float, lambda s: 0 < s < 1e6, "seconds above 0")


def _number(text: str, kind: Any, fits: Callable[[Any], bool], expected: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not fits(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return number
