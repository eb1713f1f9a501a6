"""An agent by verifiers' client for training, which renders prompts to token ids itself:
`python train_client.py TOKENIZER_FOLDER`, as `environment.command` runs it, with verifiers' Python."""

import asyncio
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT / "mrl/environments/hosted/programs"),
    str(ROOT / "launch/recipes/agents/guess_letters"),
]

import verifiers.v1 as vf  # noqa: E402


async def main(folder):
    row = json.load(sys.stdin)
    player = {"runtime": {"type": "subprocess"}, "harness": {"id": "mrl_chat"}}
    config = vf.resolve_env_config({"taskset": {"id": "guess_letters"}, "player": player})
    env = vf.load_environment(config)
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer_model_name=folder,
    )
    task_class = type(env.taskset).task_type()
    task = task_class(task_class.data_type().model_validate(row["task"]), config.taskset.task)
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    (trace,) = episode.traces
    if not trace.ok:
        raise SystemExit(str(trace.errors[-1:]))
    print(trace.reward)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
