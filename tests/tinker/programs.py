"""Programs that use the unmodified SDK, run in a process of their own: its packages are in a folder
apart from those of mrl. `python -m tests.tinker.programs NAME URL` prints what a program found as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

PROMPT, ANSWER = [70, 80, 90], [10, 11, 12, 13]
ADAM = {"learning_rate": 1e-2, "eps": 1e-8}
RATIO_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
Found = dict[str, Any]


def connected(url: str) -> tuple[Any, str]:
    """Return a client of the service, and the name of its model."""
    import tinker

    client = tinker.ServiceClient(base_url=url)
    capabilities = tinker.RestClient(base_url=url).get_server_capabilities().result()
    return client, capabilities.supported_models[0].model_name


def datum(prompt: list[int], answer: list[int], **inputs: Any) -> Any:
    """Return a datum whose inputs are numbers of the answer's tokens."""
    from tinker import types

    tokens, pad = [*prompt, *answer], [0.0] * (len(prompt) - 1)
    padded = {name: np.array([*pad, *values], np.float32) for name, values in inputs.items()}
    target = np.array(tokens[1:], np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": target, **padded},
    )


def sourced(data: Any, answer: Any) -> Any:
    """Return a datum of PROMPT and an answer that says which sample its tokens are."""
    from tinker import types

    name, num_prompt, num_answer = answer.sequence_id, len(PROMPT), len(answer.tokens)
    prompt, sample = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    return data.with_provenance(
        model_input=[
            prompt(sequence_id=name, length=num_prompt),
            sample(sequence_id=name, length=num_answer - 1),
        ],
        loss_fn_inputs=[
            prompt(sequence_id=name, offset=1, length=num_prompt - 1),
            sample(sequence_id=name, length=num_answer),
        ],
    )


def sampled(sampler: Any, n: int = 4, **params: Any) -> Any:
    """Return the answers of a sampler to PROMPT."""
    from tinker import types

    settings = types.SamplingParams(max_tokens=8, seed=1, **params)
    prompt = types.ModelInput.from_ints(PROMPT)
    return sampler.sample(prompt, num_samples=n, sampling_params=settings)


def failure_of(call: Callable[[], Any]) -> list[str]:
    """Return the class and the message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def trains(url: str) -> Found:
    """Train with every loss, and sample, as the SDK's own examples do."""
    from tinker import types

    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=4, seed=3).result()
    adam = types.AdamParams(**ADAM)
    supervised = datum(PROMPT, ANSWER, weights=[1.0] * 4)
    losses = []
    for _ in range(4):
        passed = trainer.forward_backward([supervised], "cross_entropy")
        stepped = trainer.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    ahead = trainer.forward([supervised], "cross_entropy").result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    answers = sampled(sampler).result()
    found: Found = {
        "info": [trainer.get_info().lora_rank, trainer.get_info().model_data.model_name == base],
        "losses": losses,
        "forward": [ahead.metrics["loss:sum"], ahead.loss_fn_outputs[0]["logprobs"].data[-4:]],
        "answers": [[s.tokens, s.logprobs, s.stop_reason] for s in answers.sequences],
        "ids": len({s.sequence_id for s in answers.sequences}),
    }
    data = [
        datum(PROMPT, s.tokens, logprobs=s.logprobs, advantages=[a] * len(s.tokens))
        for s, a in zip(answers.sequences, (1.0, -1.0, 0.5, -0.5), strict=True)
    ]
    traced = [sourced(d, s) for d, s in zip(data, answers.sequences, strict=True)]
    found["passes"] = {}
    for loss in RATIO_LOSSES:
        # stable_reinforce comes with provenance; for the others the service matches tokens
        passed = trainer.forward_backward(traced if loss == "stable_reinforce" else data, loss)
        trainer.optim_step(types.AdamParams(learning_rate=1e-5)).result()
        found["passes"][loss] = passed.result().metrics

    def custom(_data: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = sum((each**2).sum() for each in logprobs)
        return loss, {"own": 1.0}

    before = trainer.forward([supervised], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    passed = trainer.forward_backward_custom([supervised], custom)
    stepped = trainer.optim_step(adam).result()
    found["custom"] = [
        passed.result().metrics["loss:sum"],
        float(np.square(np.array(before.data)).sum()),
        stepped.metrics["unclipped_grad_l2:mean"],
    ]
    return found


def saves(url: str) -> Found:
    """Save, load, list and delete."""
    import tinker
    from tinker import types

    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=4, seed=3).result()
    adam, found = types.AdamParams(**ADAM), dict[str, Any]()
    supervised = datum(PROMPT, ANSWER, weights=[1.0] * 4)
    trainer.forward_backward([supervised], "cross_entropy")
    trainer.optim_step(adam).result()
    state = trainer.save_state("one", user_metadata={"of": "test"}).result().path
    named = trainer.save_weights_for_sampler("fixed").result().path
    found["paths"] = [state, named]
    later = client.create_sampling_client(model_path=named).result()
    first = sampled(later).result().sequences
    trainer.forward_backward([supervised], "cross_entropy")
    trainer.optim_step(adam).result()
    of_state = client.create_sampling_client(model_path=state).result()
    found["first"] = [[s.tokens, s.logprobs] for s in first]
    found["frozen"] = [[s.tokens, s.logprobs] for s in sampled(later).result().sequences]
    found["of state"] = [[s.tokens, s.logprobs] for s in sampled(of_state).result().sequences]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = trainer.forward([supervised], "cross_entropy").result().metrics["loss:sum"]
        trainer.load_state(state).result()
    back = trainer.forward([supervised], "cross_entropy").result().metrics["loss:sum"]
    other = client.create_training_client_from_state_with_optimizer(state).result()
    same = other.forward([supervised], "cross_entropy").result().metrics["loss:sum"]
    found["loaded"] = [moved, back, same]
    rest = client.create_rest_client()
    found["checkpoints"] = [
        [c.checkpoint_id, c.checkpoint_type, c.user_metadata, (c.size_bytes or 0) > 0]
        for c in rest.list_checkpoints(trainer.model_id).result().checkpoints
    ]
    run = rest.get_training_run(trainer.model_id).result()
    found["run"] = [run.lora_rank, run.last_checkpoint.tinker_path, run.is_lora]
    found["runs"] = len(rest.list_training_runs().result().training_runs)
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    rest.delete_checkpoint_from_tinker_path(named).result()
    left = rest.list_user_checkpoints().result().checkpoints
    found["left"] = [[c.tinker_path, c.expires_at is not None] for c in left]
    found["gone"] = failure_of(lambda: client.create_sampling_client(model_path=named).result())
    client.close("success").result()
    hosted = tinker.ServiceClient(base_url=url).create_sampling_client(model_path=state).result()
    found["hosted"] = [[s.tokens, s.logprobs] for s in sampled(hosted).result().sequences]
    found["closed"] = failure_of(
        lambda: tinker.ServiceClient(base_url=url, api_key="tml-no").holder
    )
    return found


def sampling(url: str) -> Found:
    """Sample from the base model, with the log-probs of the prompt."""
    from tinker import types

    client, base = connected(url)
    sampler = client.create_sampling_client(base_model=base).result()
    prompt = types.ModelInput.from_ints([*PROMPT, *ANSWER])
    greedy = sampled(sampler, 2, temperature=0.0).result().sequences
    full = sampler.sample(
        prompt,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    stopped = sampled(sampler, 4, stop=[greedy[0].tokens[2]]).result().sequences
    never = sampled(sampler, 2, stop=[]).result().sequences
    trainer = client.create_lora_training_client(base, rank=2).result()
    own = datum([*PROMPT, *ANSWER][:1], [*PROMPT, *ANSWER][1:], weights=[1.0] * 6)
    passed = trainer.forward([own], "cross_entropy").result()
    many = [sampled(sampler, 1) for _ in range(64)]
    return {
        "greedy": [s.tokens for s in greedy],
        "prompt": full.prompt_logprobs,
        "last": sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result(),
        "top": full.topk_prompt_logprobs,
        "trainer": passed.loss_fn_outputs[0]["logprobs"].data,
        "stopped": [[s.tokens, s.stop_reason] for s in stopped],
        "never": [len(s.tokens) for s in never],
        "many": len({tuple(each.result().sequences[0].tokens) for each in many}),
        "base": sampler.get_base_model() == base,
    }


def refusals(url: str) -> Found:
    """Ask for what the service does not have."""
    from tinker import types

    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=2).result()
    sampler = client.create_sampling_client(base_model=base).result()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    supervised = datum(PROMPT, ANSWER, weights=[1.0] * 4)
    asked: dict[str, Callable[[], Any]] = {
        "rank": lambda: client.create_lora_training_client(base, rank=4096).result(),
        "base": lambda: client.create_lora_training_client("other/model").result(),
        "unembed alone": lambda: client.create_lora_training_client(
            base, rank=2, train_mlp=False, train_attn=False
        ).result(),
        "optimizer": lambda: client.create_lora_training_client(
            base, rank=2, optimizer=types.DimuonOptimizerConfig()
        ).result(),
        "image": lambda: sampler.sample(image, 1, types.SamplingParams(max_tokens=1)).result(),
        "too long": lambda: sampler.sample(
            types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=1 << 20)
        ).result(),
        "vocabulary": lambda: sampler.sample(
            types.ModelInput.from_ints([1 << 20]), 1, types.SamplingParams(max_tokens=1)
        ).result(),
        "path": lambda: client.create_sampling_client(model_path="tinker://no/one/is").result(),
        "other": lambda: client.create_sampling_client(
            model_path="tinker://nobody:train:0/sampler_weights/x"
        ).result(),
        "option": lambda: trainer.forward_backward(
            [supervised], "cross_entropy", {"temp": 1.0}
        ).result(),
    }
    return {name: failure_of(call) for name, call in asked.items()}


def download(url: str) -> Found:
    """Save the adapter as a PEFT folder, and fetch its files."""
    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=4).result()
    path = trainer.save_weights_external("mine").result().path
    urls = client.create_rest_client().get_external_weights_urls(path).result().urls
    sizes = {name: len(urllib.request.urlopen(each).read()) for name, each in urls.items()}
    config = json.load(urllib.request.urlopen(urls["adapter_config.json"]))
    return {"path": path, "sizes": sizes, "rank": config["r"], "alpha": config["lora_alpha"]}


def policy_gradient(trainer: Any, seed: int) -> Found:
    """Take one step of RL with the share of small ids as reward."""
    from tinker import types

    sampler = trainer.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=8, seed=seed)
    answers = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, settings).result().sequences
    rewards = np.array([np.mean(np.array(a.tokens) < 60) for a in answers])
    data = [
        datum(PROMPT, a.tokens, logprobs=a.logprobs, advantages=[r + 0.01] * len(a.tokens))
        for a, r in zip(answers, (rewards - rewards.mean()).tolist(), strict=True)
    ]
    passed = trainer.forward_backward(data, "ppo")
    stepped = trainer.optim_step(types.AdamParams(**ADAM)).result()
    metrics = passed.result().metrics
    return {
        "tokens": [a.tokens for a in answers],
        "logprobs": [a.logprobs for a in answers],
        "loss": metrics["loss:sum"],
        "native": metrics["session/native_rows:sum"],
        "norm": stepped.metrics["unclipped_grad_l2:mean"],
    }


def reinforces(url: str, rank: str) -> list[Found]:
    """Train an adapter of a rank by RL."""
    client, base = connected(url)
    trainer = client.create_lora_training_client(base, rank=int(rank), seed=5).result()
    return [policy_gradient(trainer, seed) for seed in range(3)]


PROGRAMS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (trains, saves, sampling, refusals, download, reinforces)
}


def main(programs: dict[str, Callable[..., Any]]) -> None:
    """Run the program that the command line names, and print what it has found."""
    logging.disable(logging.ERROR)
    print(json.dumps(programs[sys.argv[1]](*sys.argv[2:])))


if __name__ == "__main__":
    main(PROGRAMS)
