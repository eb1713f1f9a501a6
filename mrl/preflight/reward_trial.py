"""Call the user's reward functions on a few real rows before an engine is started.

As in training, a function runs in a worker process that can be killed. The function scores fixed
completions: the row's answer, a wrong answer, and an empty string. mrl's own rewards are not
called. Reward servers are not called, because a call may cost money or load the server. Reward
models are not called, because other checks cover them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from mrl.config import Recipe
from mrl.data.eval_sets import EvalSet
from mrl.errors import InputError
from mrl.rewards import reward_names
from mrl.rewards.base import HANG, RewardError, total_of
from mrl.rewards.resolve import REWARD_MODEL
from mrl.rewards.terms import terms_of
from mrl.rewards.worker_calls import call_worker, reward_worker
from mrl.system.json_worker import JsonWorker
from mrl.types import Prompt

MAX_ROWS = 4
"""Largest number of rows on which a function is called. Each of these rows is the first row of a
data source or eval set."""
WRONG = "I do not know."
WHAT_TO_DO = "mrl reward test tries it on more rows"


def try_rewards(
    recipe: Recipe,
    prompts: Iterable[Prompt],
    eval_sets: Iterable[EvalSet],
    tokenizer: Any,
    warn: Callable[[str], None],
) -> None:
    """Call the user's reward functions on a few rows of the data.

    A function is called on the first row of every source and eval set that it scores, but on at
    most MAX_ROWS rows. If it fails for some completions of a row, `warn(text)` names these
    completions. `warn` is also called if the function returns None for all completions of a row.
    Raises InputError if the function fails for all completions of a row, hangs, or does not return
    one entry per completion. Environments are not called, because they give rewards only in a
    conversation.
    """
    rows: dict[str, dict[str | None, Prompt]] = {}
    built_in = reward_names()
    sets = [(recipe, "", prompts), *((e.recipe, e.config.name, e.prompts) for e in eval_sets)]
    for each, name, set_prompts in sets:
        is_scored = each.environment is not None and each.environment.gives_rewards
        if is_scored or recipe.debug.load_rollouts is not None:
            continue
        for prompt in set_prompts:
            rewards = each.reward if prompt.reward is None else each.data.rewards[prompt.reward]
            for term in () if rewards is None else terms_of(rewards):
                if _is_elsewhere(term.path) or term.path in built_in:
                    continue
                rows.setdefault(term.path, {}).setdefault(name or prompt.source_name, prompt)
    for spec, first in rows.items():
        with closing(reward_worker(spec, recipe.reward_timeout_s)) as worker:
            worker.start()
            for prompt in list(first.values())[:MAX_ROWS]:
                _try_row(worker, spec, prompt, tokenizer, recipe.reward_timeout_s, warn)


def _is_elsewhere(spec: str) -> bool:
    """Return whether `spec` names a reward server or a reward model, not a function."""
    return spec.lower().startswith(("http://", "https://")) or spec.startswith(REWARD_MODEL)


def _try_row(
    worker: JsonWorker,
    spec: str,
    prompt: Prompt,
    tokenizer: Any,
    timeout_s: float,
    warn: Callable[[str], None],
) -> None:
    """Score all completions of a row in one call. If the call fails, score each completion alone.

    A training run handles a failed call in the same way.
    """
    texts = _texts(prompt)
    where = f"{prompt.source}: the reward {spec!r}"
    reply = call_worker(worker, _request(prompt, texts, tokenizer), timeout_s)
    if "error" not in reply:
        if all(total_of(entry) is None for entry in reply["rewards"]):
            warn(f"{where} gave None for {_shown(texts)}: such samples are masked; {WHAT_TO_DO}")
        return
    if reply["broken"] or reply["kind"] == HANG:
        raise InputError(f"{where} {_what_it_did(reply)}; {WHAT_TO_DO}")
    failed: dict[str, dict[str, Any]] = {}
    for text in texts:
        alone = call_worker(worker, _request(prompt, [text], tokenizer), timeout_s)
        if "error" in alone:
            failed[text] = alone
    if len(failed) == len(texts):
        raise InputError(f"{where} {_what_it_did(next(iter(failed.values())))}; {WHAT_TO_DO}")
    for text, alone in failed.items():
        warn(
            f"{where} {_what_it_did(alone)} for the completion {text!r}: such samples are masked; "
            f"{WHAT_TO_DO}"
        )


def _what_it_did(reply: Mapping[str, Any]) -> str:
    """Return a phrase that says how a reward function failed. The names of mrl's own exceptions are
    left out of the phrase.

    `reply` is the worker's answer with the keys `error` and `kind` (`mrl.rewards.worker`).
    """
    error, kind = str(reply["error"]), reply["kind"]
    is_from_mrl = kind not in (RewardError.kind, HANG)
    what = error.partition(": ")[2] if is_from_mrl and ": " in error else error
    if not is_from_mrl:
        return f"failed ({what})"
    return what if what.startswith("returned") else f"gave a wrong value: {what}"


def _texts(prompt: Prompt) -> list[str]:
    """Return the completions to score: the row's answer, a wrong answer, and an empty string.

    The row's answer is left out if it is neither a string nor a number.
    """
    answer = prompt.columns.get("answer")
    known = [str(answer)] if isinstance(answer, (str, int, float)) else []
    return list(dict.fromkeys([*known, WRONG, ""]))


def _request(prompt: Prompt, texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Return the request with which a training step would score `texts`, completions of `prompt`."""
    columns: dict[str, Any] = {key: [value] * len(texts) for key, value in prompt.columns.items()}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [[*tokenizer.encode(text, add_special_tokens=False), *end] for text in texts]
    return {
        "prompts": [prompt.content] * len(texts),
        "completions": list(texts),
        "columns": {**columns, "completion_ids": ids},
        "step": 0,
    }


def _shown(texts: Sequence[str]) -> str:
    return f"the completions {', '.join(repr(text) for text in texts)}"
