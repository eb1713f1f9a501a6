"""Formulas under their published names: what a user asks for, and what `mrl check` calls it."""

from __future__ import annotations

import json

from tests.users.things import User, thing


@thing("I use IcePop: importance mis, not a mask.", is_long=False)
def use_icepop(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "algorithm.importance=mis")
    assert "mis of each token in [0.5, 5] (IcePop" in " ".join(printed.split())
    return "gspo, mis of each token in [0.5, 5] (IcePop)"


@thing("I use DPPO as published, its ratio against the engine's log-probs.")
def use_dppo(user: User) -> str:
    options = "name: cispo, clip_high: 19, importance: tis, importance_high: 20"
    recipe = [*user.recipe("run"), f"algorithm={{{options}, masks: [{{name: dppo}}]}}"]
    printed = " ".join(user.mrl("check", *recipe).split())
    assert "together DPPO, arXiv 2602.04879" in printed
    trained = user.mrl("train", *recipe, "train.num_steps=1")
    assert "run folder" in trained
    return "cispo with tis and the dppo mask: DPPO, and a step of it trains"


@thing("I use gspo_token, whose tokens all have their sample's advantage.", is_long=False)
def use_gspo_token(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "algorithm.name=gspo_token")
    assert "so it trains as gspo does" in " ".join(printed.split())
    return "every token has its sample's advantage, so it trains as gspo does"


GAME = "{name: guess_letter, arguments: {turns: 3, letters: abcdefgh, repeats: 4}, max_turns: 3}"


@thing(
    "I credit an environment's rewards at their turns, and gspo_token learns otherwise than gspo."
)
def credit_turns(user: User) -> str:
    turns, losses = "algorithm.turn_rewards=true", {}
    refused = user.mrl("check", *user.recipe("run"), "algorithm.name=gspo_token", turns, code=2)
    assert "algorithm.turn_rewards: a reward function gives one reward" in " ".join(refused.split())
    for name, more in {"gspo": [], "gspo_token": [turns]}.items():
        game = ["reward=null", f"environment={GAME}", f"algorithm.name={name}", *more]
        user.train(name, "train.num_steps=1", *game)
        row = json.loads((user.folder / name / "metrics.jsonl").read_text().splitlines()[0])
        losses[name] = (row["grad_norm"], row["reward/mean"])
    assert losses["gspo"][1] == losses["gspo_token"][1]
    assert losses["gspo"][0] != losses["gspo_token"][0]
    return f"the same rollouts, gradient norms {losses['gspo'][0]:g}, {losses['gspo_token'][0]:g}"


@thing("I let GAE take the critic's value where an answer was cut off.")
def bootstrap(user: User) -> str:
    found = []
    for output, more in {"off": [], "on": ["algorithm.bootstrap_truncated=true"]}.items():
        user.train(output, "train.num_steps=1", "algorithm.name=ppo", "critic.head_std=0.5", *more)
        row = json.loads((user.folder / output / "metrics.jsonl").read_text().splitlines()[0])
        found.append(row["value/return_mean"])
    assert found[0] != found[1]
    return f"mean returns {found[0]:g} without, {found[1]:g} with it"
