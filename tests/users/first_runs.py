"""First runs: check, train, look at the run, take the model away."""

from __future__ import annotations

import json

from tests.users.things import User, thing


@thing("I check a recipe before I train it.", is_long=False)
def check_a_recipe(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"))
    assert "train" in printed
    return printed.strip().splitlines()[-1]


@thing("I mistype a key.", is_long=False)
def mistype_a_key(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "optimizer.learning_rte=1", code=2)
    assert "unknown key" in printed
    return printed.strip()


@thing("I train two steps, and look at the page of the run.")
def look_at_a_run(user: User) -> str:
    user.train("run", "train.num_steps=2")
    user.mrl("view", user.folder / "run")
    page = user.folder / "run" / "view.html"
    assert "grad_norm" in page.read_text()
    return f"{page.name}, {page.stat().st_size // 1000} kB"


@thing("I repeat a step of a run, and it gives the same bits.")
def repeat_a_step(user: User) -> str:
    user.train("run", "train.num_steps=2", "debug.save_rollouts=true", "checkpoint.save_every=1")
    printed = user.mrl("replay", user.folder / "run", "1")
    assert "bitwise equal" in printed
    return next(line for line in printed.splitlines() if "bitwise equal" in line)


@thing("I train twice with another seed, and ask where the runs part.")
def compare_two_runs(user: User) -> str:
    for name, seed in (("a", 0), ("b", 1)):
        user.train(name, "train.num_steps=1", f"seed={seed}")
    printed = user.mrl("diff", user.folder / "a", user.folder / "b")
    assert "seed" in printed
    return next(line for line in printed.splitlines() if "seed" in line)


@thing("I evaluate a run on questions of its own, and export it for transformers.")
def evaluate_and_export(user: User) -> str:
    questions = user.write("questions.jsonl", json.dumps({"prompt": "a b"}) + "\n")
    sets = f"eval.sets=[{{name: own, path: {questions}, reward: first_char}}]"
    user.train("run", "train.num_steps=1", sets)
    printed = user.mrl("eval", user.folder / "run")
    assert "own" in printed
    user.mrl("export", user.folder / "run", user.folder / "model")
    names = {file.name for file in (user.folder / "model").iterdir()}
    assert {"config.json", "tokenizer.json", "README.md"} <= names
    return (
        f"{next(line for line in printed.splitlines() if 'own' in line).strip()}; {sorted(names)}"
    )


@thing("I ask which samples and layers the mismatch of a step comes from.")
def ask_why(user: User) -> str:
    user.train("run", "train.num_steps=1")
    printed = user.mrl("why", user.folder / "run", "0")
    assert "step 0" in printed
    return printed.strip().splitlines()[0]
