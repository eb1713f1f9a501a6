"""An example of your own training loop on a service: supervised steps, then a tiny RL loop.

    mrl toy-model toy/model
    mrl serve service.yaml &                         # docs/client.md has one for the toy model
    python launch/client_loop.py service

The task is to answer any prompt with small token ids, so no tokenizer is needed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import numpy as np

from mrl.client import Datum, Sample, ServiceClient, Session
from mrl.errors import InputError, RunFailed

WAIT_S = 300.0
"""How many seconds to wait for a service that has not started yet."""
NUM_IDS = 60
"""Token ids below this one count as small."""
PROMPTS = [[70, 80, 90], [100, 65], [85, 95, 75, 105]]


def supervised(session: Session, num_steps: int) -> list[float]:
    """Train on answers of small ids; return the mean loss per token of each step."""
    draw, losses = random.Random(0), []
    for _ in range(num_steps):
        data = []
        for prompt in PROMPTS:
            answer = [draw.randrange(5, NUM_IDS) for _ in range(8)]
            weights = [0.0] * len(prompt) + [1.0] * len(answer)
            data.append(Datum(prompt + answer, weights=weights, weight=1 / (8 * len(PROMPTS))))
        passed = session.forward_backward(data, "cross_entropy")
        session.optim_step()  # queued behind forward_backward, so there is no need to wait for that
        losses.append(passed.result().loss)
    return losses


def reward(answer: Sample) -> float:
    """Return the share of small ids in an answer."""
    return float(np.mean(answer.tokens < NUM_IDS))


def reinforced(session: Session, num_steps: int, group: int = 16) -> list[float]:
    """Train for small ids with PPO's clipped loss; return the mean reward of each step."""
    means = []
    for step in range(num_steps):
        asked = session.sample(PROMPTS, n=group, max_tokens=8, seed=step)
        data, rewards = [], []
        for answers in asked.result():
            scored = np.array([reward(answer) for answer in answers])
            advantages = (scored - scored.mean()) / (scored.std() + 1e-4)
            count = sum(len(answer.tokens) for answer in answers) * len(PROMPTS)
            data += [
                answer.datum(float(a), weight=1 / count)
                for answer, a in zip(answers, advantages, strict=True)
                if a
            ]
            rewards += scored.tolist()
        if data:
            session.forward_backward(data, "ppo", clip_low=0.2, clip_high=0.28)
            session.optim_step()
        means.append(float(np.mean(rewards)))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a service with your own loop.")
    parser.add_argument("service", type=Path, help="the output_dir of a service")
    parser.add_argument("--name", default=f"loop-{int(time.time())}", help="name of the session")
    parser.add_argument("--steps", type=int, default=12, help="of each of the two loops")
    args = parser.parse_args()
    try:
        run(args)
    except (InputError, RunFailed) as error:
        sys.exit(f"client_loop: {error}")


def run(args: argparse.Namespace) -> None:
    """Create a session, train it with both loops, and remove it."""
    session = ServiceClient(args.service, wait_s=WAIT_S).create_session(
        args.name,
        output_dir=args.service / "runs" / args.name,
        lora={"rank": 8, "alpha": 16},
        optimizer={"lr": 1e-2},
    )
    losses = supervised(session, args.steps)
    print("supervised: loss of a token", " ".join(f"{loss:.3f}" for loss in losses))
    rewards = reinforced(session, args.steps)
    print("reinforced: mean reward    ", " ".join(f"{mean:.3f}" for mean in rewards))
    saved = session.save().result()
    print(f"saved version {saved.version}; next: mrl export {saved.folder} my_adapter")
    session.remove()


if __name__ == "__main__":
    main()
