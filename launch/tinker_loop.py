"""An example for stock clients of the Tinker API: supervised steps, then a tiny RL loop.

    mrl tenants key add alice --service service      # prints the key
    mrl serve service.yaml &                         # docs/tinker.md has one for the toy model
    TINKER_API_KEY=tml-... TINKER_BASE_URL=http://127.0.0.1:8787 python launch/tinker_loop.py

The SDK is unmodified; nothing here is of mrl. The task is to answer any prompt with small token ids.

Dimensions: P prompts, G answers to a prompt.
"""

from __future__ import annotations

import argparse
import random

import numpy as np
import tinker
from tinker import types

NUM_IDS = 60
"""Token ids below this one count as small."""
PROMPTS_P = [[70, 80, 90], [100, 65], [85, 95, 75, 105]]


def datum(prompt: list[int], answer: list[int], **inputs: list[float]) -> types.Datum:
    """Return a datum; `inputs` are numbers of the answer's tokens."""
    tokens, pad = [*prompt, *answer], [0.0] * (len(prompt) - 1)
    arrays = {name: np.array([*pad, *values], np.float32) for name, values in inputs.items()}
    targets = np.array(tokens[1:], np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, **arrays},
    )


def supervised(trainer: tinker.TrainingClient, num_steps: int) -> None:
    """Train on answers of small ids."""
    draw = random.Random(0)
    for step in range(num_steps):
        answers_P = [[draw.randrange(5, NUM_IDS) for _ in range(8)] for _ in PROMPTS_P]
        share = [1 / (8 * len(PROMPTS_P))] * 8
        data = [datum(p, a, weights=share) for p, a in zip(PROMPTS_P, answers_P, strict=True)]
        passed = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        print(f"supervised {step}: loss of a token {passed.result().metrics['loss:sum']:.3f}")


def reinforced(trainer: tinker.TrainingClient, num_steps: int, group: int = 16) -> None:
    """Train for small ids by importance-sampled policy gradients."""
    for step in range(num_steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, seed=step)
        futures_P = [
            sampler.sample(types.ModelInput.from_ints(p), group, params) for p in PROMPTS_P
        ]
        data, rewards = [], []
        for prompt, future in zip(PROMPTS_P, futures_P, strict=True):
            answers_G = future.result().sequences
            rewards_G = np.array([np.mean(np.array(a.tokens) < NUM_IDS) for a in answers_G])
            advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)
            rewards += rewards_G.tolist()
            for answer, advantage in zip(answers_G, advantages_G, strict=True):
                share = float(advantage) / (8 * group * len(PROMPTS_P))
                advantages = [share] * len(answer.tokens)
                logprobs = list(answer.logprobs or [])
                data.append(datum(prompt, answer.tokens, logprobs=logprobs, advantages=advantages))
        passed = trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        rows = passed.result().metrics.get("session/replayed_rows:sum", 0.0)
        print(f"reinforced {step}: mean reward {np.mean(rewards):.3f}, {rows:.0f} rows replayed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with the Tinker SDK.")
    parser.add_argument("--steps", type=int, default=12, help="of each of the two loops")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    args = parser.parse_args()
    (model,) = tinker.RestClient().get_server_capabilities().result().supported_models
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(model.model_name, rank=args.rank).result()
    supervised(trainer, args.steps)
    reinforced(trainer, args.steps)
    print(f"saved {trainer.save_state('final').result().path}")
    service.close("success").result()


if __name__ == "__main__":
    main()
