"""A newcomer's recipe, broken in many ways: each is one clear line, before anything is loaded."""

from __future__ import annotations

import json
import shutil

from tests.users.things import User, thing

OVERRIDES = {
    "rollout.sample_per_prompt=8": "did you mean 'rollout.samples_per_prompt'",
    "optimizer.lr=-1e-3": "optimizer.lr: Input should be greater than 0",
    "optimizer.lr=fast": "optimizer.lr: Input should be a valid number",
    "train.num_steps=many": "train.num_steps: Input should be a valid integer",
    "rollout.top_p=0": "rollout.top_p: Input should be greater than 0",
    "rollout.max_response_len=1000000000": "leaves no room for a prompt in a context of 512",
    "rollout.prompts_per_step=10000": "512 prompts, a step needs 10000",
    "parallel.tensor_model_parallel_size=8": "start a multiple of 8 ranks",
    "algorithm=grpo": "did you mean algorithm.name",
    "algorithm.name=grop": "did you mean 'grpo'",
    "reward=frist_char": "did you mean 'first_char'",
    "reward=mine.py:score": "no file mine.py",
    "reward=exact_match": "no column `answer`",
    "data.path=rows.json": "rows.json: No such file",
    "data.path=empty.jsonl": "no rows",
    "data.path=cut.jsonl": "cut.jsonl:2: not valid JSON",
    "data.path=other.jsonl": "no `prompt`; this row has question",
    "data.prompt_key=question": "no `question`; this row has prompt",
    "model.path=toy/modle": "no folder toy/modle",
    "model.path=experts": "routes a token to 99 experts, but has 8",
    "model.path=untokenized": "no usable tokenizer",
    "output_dir=cut.jsonl": "cut.jsonl is not a folder; choose another",
    "rollout.server_args={mem_fracton: 1}": "did you mean 'mem_fraction_static'",
    "megatron={recompute_granularty: full}": "did you mean 'recompute_granularity'",
}


@thing("I break a recipe in twenty-four ways, and each time one line says what to mend.")
def break_a_recipe(user: User) -> str:
    user.write("empty.jsonl", "")
    user.write("cut.jsonl", '{"prompt": "a"}\n{"prompt": ')
    user.write("other.jsonl", '{"question": "a"}\n' * 16)
    for name in ("experts", "untokenized"):
        shutil.copytree(user.toy.model, user.folder / name)
    config = user.folder / "experts/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts_per_tok": 99}))
    (user.folder / "untokenized/tokenizer.json").write_text("{}")
    lengths = []
    for override, reason in OVERRIDES.items():
        printed = user.mrl("check", *user.recipe("run"), override, code=2).strip()
        assert printed.startswith("mrl: "), printed
        assert "\n" not in printed, printed
        assert reason in printed, (override, printed)
        lengths.append(len(printed))
    assert not (user.folder / "run").exists()
    return f"{len(OVERRIDES)} lines of {min(lengths)} to {max(lengths)} characters"


@thing("I choose what the engine cannot do for an architecture, and the check finds it.")
def limits_of_the_engine(user: User) -> str:
    shutil.copytree(user.toy.model, user.folder / "dense")
    file = user.folder / "dense/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mlp_only_layers": [0]}))
    dense = user.mrl("check", *user.recipe("run"), f"model.path={file.parent}", code=2)
    assert "has no tensor model.layers.0.mlp.gate_proj.weight" in dense, dense
    weights = user.mrl("check", *user.recipe("run"), "moe.replay=ids_weights",
                       "moe.routing_replay=r3", code=2)  # fmt: skip
    assert "rollout.return_routing_weights=true" in weights
    return weights.strip()
