"""Small things that cost minutes: keys of other frameworks, paths, hub ids, step numbers, limits."""

from __future__ import annotations

from tests.loop.conftest import TOY_RECIPE
from tests.users.things import User, thing


@thing("I write keys as TRL, verl and slime call them.", is_long=False)
def keys_of_other_frameworks(user: User) -> str:
    recipe = user.recipe("run")
    keys = {
        "learning_rate=1e-6": "'optimizer.lr'",
        "rollout.n=8": "'rollout.samples_per_prompt'",
        "lr_scheduler=cosine": "'optimizer.lr_decay_style'",
        "optimizer.learning_rte=1": "'optimizer.lr'",
    }
    printed = user.mrl("check", *recipe, *keys, code=2)
    assert all(own in printed for own in keys.values())
    return printed.strip()


@thing("I give a model's hub id where its folder belongs.", is_long=False)
def hub_id(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "model.path=Qwen/Qwen3-30B-A3B", code=2)
    assert "hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B" in printed
    return printed.strip()


@thing("I check a shipped recipe from another directory; no table of versions is in the way.")
def check_from_another_directory(user: User) -> str:
    printed = user.mrl("check", TOY_RECIPE, f"model.path={user.toy.model}")
    assert "first_char.jsonl: 512 prompts" in printed
    assert "Versions" not in printed
    assert "what it implies" in user.mrl(
        "check", TOY_RECIPE, f"model.path={user.toy.model}", "--versions"
    )
    return printed.strip().splitlines()[-1]


@thing("I want every key with its default and meaning, as a recipe to fill in.", is_long=False)
def print_every_key(user: User) -> str:
    recipe = user.write("mine.yaml", user.mrl("recipe"))
    said = user.mrl("check", recipe, code=2)
    assert all(key in said for key in ("model.path", "rollout.max_response_len", "output_dir"))
    rows = user.write("rows.jsonl", '{"prompt": "a b"}\n' * 16)
    keys = [f"data.path={rows}", "reward=first_char", "train.num_steps=1"]
    printed = user.mrl("check", recipe, *user.toy.overrides(user.folder / "run"), *keys)
    assert printed.endswith("ok\n")
    return f"{len(recipe.read_text().splitlines())} lines"


@thing("I check a recipe for several GPUs on a login node.")
def check_on_a_login_node(user: User) -> str:
    recipe = [*user.recipe("run"), "parallel.expert_model_parallel_size=8"]
    said = user.mrl("check", *recipe, code=2)
    assert "`mrl check RECIPE --gpus 8`" in said
    assert user.mrl("check", *recipe, "--gpus", "8").endswith("ok\n")
    return said.strip()


@thing("I mistype a kernel of the engine.")
def mistype_an_engine_argument(user: User) -> str:
    argument = "rollout.server_args={moe_runner_backend: tritn}"
    said = user.mrl("check", *user.recipe("run"), argument, code=2)
    assert "expects one of auto, deep_gemm, triton" in said
    return said.strip()


@thing("The engine cannot start, and I want to know why in one line.")
def cause_of_death(user: User) -> str:
    argument = "rollout.server_args={attention_backend: fa3}"
    printed = user.train("run", argument, code=73)
    (last,) = [line for line in printed.splitlines() if line.startswith("mrl: ")]
    assert last.startswith("mrl: engine: the SGLang server died while starting, exit code ")
    assert "its log is " in last
    assert "Traceback" not in printed
    return last
