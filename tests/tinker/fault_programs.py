"""Programs as in programs.py, to which something happens while they wait for a file in a folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tinker.programs import (
    ADAM,
    ANSWER,
    PROMPT,
    Found,
    connected,
    datum,
    failure_of,
    main,
    policy_gradient,
    sampled,
)


def meet(folder: str, ready: str, go: str) -> None:
    """Make the file `ready`, and wait for the file `go`."""
    Path(folder, ready).touch()
    while not Path(folder, go).exists():
        time.sleep(0.05)


def goes_on(url: str, folder: str) -> Found:
    """Train, and wait in the middle."""
    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=4, seed=5).result()
    steps = [policy_gradient(trainer, seed) for seed in range(2)]
    meet(folder, "ready", "go")
    steps += [policy_gradient(trainer, seed) for seed in range(2, 4)]
    return {"steps": steps, "saved": trainer.save_state("end").result().path}


def loses(url: str, folder: str) -> Found:
    """Post gradients, wait, and go on."""
    from tinker import types

    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=4, seed=5).result()
    supervised = datum(PROMPT, ANSWER, weights=[1.0] * 4)
    state = trainer.save_state("start").result().path
    trainer.forward_backward([supervised], "cross_entropy").result()
    meet(folder, "ready", "go")
    refused = failure_of(lambda: trainer.optim_step(types.AdamParams(**ADAM)).result())
    again = client.create_training_client_from_state_with_optimizer(state).result()
    passed = again.forward_backward([supervised], "cross_entropy")
    again.optim_step(types.AdamParams(**ADAM)).result()
    return {"refused": refused, "loss": passed.result().metrics["loss:sum"]}


def partial(url: str) -> Found:
    """Train on a batch that the SDK splits, and whose later part is refused; then on a whole one."""
    from tinker import types

    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=2, seed=5).result()
    other = client.create_lora_training_client(base, rank=2, seed=5).result()
    supervised = datum(PROMPT, ANSWER, weights=[1e-3] * 4)
    batch, adam = [supervised] * 1025, types.AdamParams(**ADAM)
    wrong = datum(PROMPT, [1 << 20], weights=[1.0])
    passed = trainer.forward_backward([*batch[:-1], wrong], "cross_entropy")
    stepped = trainer.optim_step(adam)
    found: Found = {
        "refused": failure_of(passed.result),
        "step": failure_of(stepped.result),
    }
    for each in (trainer, other):
        each.forward_backward(batch, "cross_entropy").result()
        norm = each.optim_step(adam).result().metrics["unclipped_grad_l2:mean"]
        found.setdefault("norms", []).append(norm)
    return found


def loads(url: str, folder: str) -> Found:
    """Load a checkpoint into a new model, wait, and go on."""
    from tinker import types

    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=4, seed=5).result()
    policy_gradient(trainer, 0)
    state = trainer.save_state("start").result().path
    again = client.create_training_client_from_state(state).result()
    supervised = [datum(PROMPT, ANSWER, weights=[1.0] * 4)]
    before = again.forward(supervised, "cross_entropy").result().metrics["loss:sum"]
    meet(folder, "ready", "go")
    after = again.forward(supervised, "cross_entropy").result().metrics["loss:sum"]
    again.forward_backward(supervised, "cross_entropy")
    again.optim_step(types.AdamParams(**ADAM)).result()
    return {"losses": [before, after]}


def pauses(url: str, folder: str) -> Found:
    """Post gradients, and go on while the model is paused, and when it is resumed."""
    from tinker import types

    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=4, seed=5).result()
    policy_gradient(trainer, 0)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    before = [s.tokens for s in sampled(sampler).result().sequences]
    supervised = [datum(PROMPT, ANSWER, weights=[1.0] * 4)]
    trainer.forward_backward(supervised, "cross_entropy").result()
    meet(folder, "ready", "paused")
    found: Found = {"samples": [before, [s.tokens for s in sampled(sampler).result().sequences]]}
    found["paused"] = failure_of(lambda: trainer.optim_step(types.AdamParams(**ADAM)).result())
    meet(folder, "sampled", "go")
    found["resumed"] = failure_of(lambda: trainer.optim_step(types.AdamParams(**ADAM)).result())
    return found


PROGRAMS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (goes_on, loses, partial, loads, pauses)
}

if __name__ == "__main__":
    main(PROGRAMS)
