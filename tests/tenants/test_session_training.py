"""Training by operations: an SFT loop of a client has the bits of mrl's own SFT."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config import OptimizerConfig, Recipe, SftConfig
from mrl.data.reader import SftExample
from mrl.errors import InputError, NotFinite
from mrl.learn.sft import run_sft
from mrl.run.folder import RunFolder
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.samples import Samples
from mrl.service.sessions.trainer import SessionTrainer
from mrl.system import heartbeat
from mrl.types import Sample
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.conftest import make_samples, write_model
from tests.parallel.layouts import exported, join_mesh
from tests.parallel.lora.tenants import differences, make, make_base
from tests.ranks import run_ranks

NUM_STEPS, BATCH, LR = 3, 4, 1e-3
BOUNDS = Bounds(vocab_size=1 << 20, context_len=1 << 20)


@pytest.fixture(scope="module")
def model_path(made_once: Callable[..., Path]) -> Path:
    return made_once("untied", write_model)


def recipe_of(path: Path, output: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": str(path)},
            "train": {"num_steps": 0, "micro_batch_tokens": 64},
            "rollout": {"max_response_len": 1},
            "data": {"path": "/dev/null"},
            "checkpoint": {"async_save": False},
            "output_dir": str(output),
        }
    )


def of_sft(path: Path, mesh: Mesh, recipe: Recipe, examples: list[SftExample]) -> dict[str, Any]:
    """The adapter after `sft:` of a recipe."""
    policy = make("b", path, mesh)
    config = SftConfig(path="/dev/null", num_steps=NUM_STEPS, batch_size=BATCH, lr=LR)
    run_sft(examples, config, recipe, policy, mesh)
    found = exported(policy)
    policy.close()
    return found


def operation(trainer: SessionTrainer, kind: str, **keys: Any) -> dict[str, Any]:
    body = read_body({"kind": kind, **keys}, BOUNDS)
    try:
        return trainer.run(body)
    except Exception:
        trainer.note_failure(kind, body)
        raise


def of_client(
    trainer: SessionTrainer, policy: Policy, other: Policy, examples: list[SftExample]
) -> dict[str, Any]:
    """The adapter after a client's loop over the same rows, another policy's turn in each step."""
    order = random.Random("warm start/0")
    for _ in range(NUM_STEPS):
        rows = [examples[i] for i in order.sample(range(len(examples)), BATCH)]
        count = sum(len(row.token_ids) - row.prompt_len for row in rows)
        sequences = [
            {
                "tokens": row.token_ids.tolist(),
                "weights": [float(t >= row.prompt_len) for t in range(len(row.token_ids))],
                "weight": float(torch.tensor(1.0 / count)),
            }
            for row in rows
        ]
        policy.mount()
        operation(trainer, "forward_backward", loss="cross_entropy", sequences=sequences)
        other.mount()
        policy.mount()
        operation(trainer, "optim_step")
    return exported(policy)


def drop(trainer: SessionTrainer, tokens: list[int], refused: Callable[..., None]) -> None:
    """Drop gradients, with a reason and without one, and find none before and after."""
    refused(InputError, "optim_step")
    for reason in ("a part was refused", None):
        operation(trainer, "forward_backward", loss="cross_entropy", sequences=[{"tokens": tokens}])
        if reason is None:
            operation(trainer, "drop_gradients")
        else:
            refused(InputError, "drop_gradients", reason=reason)
        refused(InputError, "optim_step")
    large = {"tokens": tokens, "weight": 3e17}
    for _ in range(12):  # their norms are finite, and the numbers of their sum, but not its norm
        operation(trainer, "forward_backward", loss="cross_entropy", sequences=[large])
    refused(NotFinite, "optim_step")


def trained(path: Path, sizes: dict[str, int], samples: list[Sample], root: Path) -> dict[str, Any]:
    mesh = join_mesh(path, sizes)
    recipe = recipe_of(path, root / "run")
    examples = [SftExample(s.token_ids, s.prompt_len, f"row {i}") for i, s in enumerate(samples)]
    own = of_sft(path, mesh, recipe, examples)
    base = make_base(path, mesh)
    policy, other = make("b", path, mesh, base), make("a", path, mesh, base)
    policy.mount()
    policy.make_optimizer(OptimizerConfig(lr=LR))
    folder, kept = RunFolder(recipe.output_dir), Samples()
    if mesh.rank == 0:
        folder.open(recipe)
    trainer = SessionTrainer(recipe, mesh, folder, policy, kept)
    before = exported(policy)
    found: dict[str, Any] = {"same": differences(of_client(trainer, policy, other, examples), own)}
    found["moved"] = differences(exported(policy), before)
    tokens = samples[0].token_ids.tolist()
    one = {"tokens": tokens, "logprobs": [0.0] * len(tokens), "advantages": [1.0] * len(tokens)}
    after, refusals = exported(policy), found.setdefault("refusals", [])

    def refused(kind: type[Exception], name: str, **keys: Any) -> None:
        with pytest.raises(kind) as error:
            operation(trainer, name, **keys)
        refusals.append(str(error.value))

    drop(trainer, tokens, refused)
    huge = {**one, "logprobs": [-1e30] * len(tokens), "advantages": [-1.0] * len(tokens)}
    refused(NotFinite, "forward_backward", loss="importance_sampling", sequences=[one, huge])
    refused(InputError, "optim_step")
    refused(InputError, "forward_backward", loss="ppo", sequences=[{**one, "sample": "x-1/0/0"}])
    kept.keep("x-1/0/0", samples[0])
    refused(
        InputError, "forward_backward", loss="ppo",
        sequences=[{**one, "tokens": [*tokens[:-1], tokens[-1] ^ 1], "sample": "x-1/0/0"}],
    )  # fmt: skip
    found["after"] = differences(exported(policy), after)
    with pytest.raises(InputError, match="gradients are missing"):
        operation(trainer, "optim_step")
    (passed,) = operation(trainer, "forward", sequences=[{"tokens": tokens, "sample": "x-1/0/0"}])[
        "logprobs"
    ]
    found["apart"] = [passed[0], max(passed[1:]), len(passed) - len(tokens)]
    half = {"tokens": tokens, "weights": [0.5] * len(tokens), "weight": 4.0, "sample": "x-1/0/0"}
    given = operation(trainer, "forward_backward", loss="cross_entropy", sequences=[half])
    found["half"] = [given["loss"], -2.0 * sum(passed)]
    ratio = {**one, "logprobs": passed, "sample": "x-1/0/0"}
    given = operation(trainer, "forward_backward", loss="ppo", sequences=[ratio])
    found["loss"] = [given["loss"], len(tokens) - 1]
    found["replay"] = given["metrics"]["routing/replay_coverage"]
    saved = operation(trainer, "save")
    operation(trainer, "optim_step", lr=1e-2)
    found["versions"] = [saved["version"], trainer.version]
    refused(InputError, "load", version=77)
    operation(trainer, "load", version=saved["version"])
    found["loaded"] = differences(exported(policy), after)
    found["versions"].append(trainer.version)
    found["parts"] = parts_of_passes(trainer, [tokens[:2], tokens, tokens])
    found["steps"] = [row["step"] for row in folder.read_metrics()]
    return found


def parts_of_passes(trainer: SessionTrainer, passes: list[list[int]]) -> list[str]:
    """The phase that the watchdog sees while the model computes, of each of some passes."""
    with open(heartbeat.open_page(), "rb") as file:
        page = mmap.mmap(file.fileno(), heartbeat.SIZE, access=mmap.ACCESS_READ)
    seen: list[str] = []

    def look(*_: Any) -> None:
        seen.append(heartbeat.read_page(page).phase)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    parts = []
    for tokens in passes:
        seen.clear()
        operation(trainer, "forward", sequences=[{"tokens": tokens}])
        (part,) = set(seen)
        parts.append(part)
    hook.remove()
    heartbeat.close_page()
    return parts


def check(found: dict[str, Any]) -> None:
    short, long, again = found["parts"]
    assert (short, long) == ("train:forward-2", again)
    assert long.startswith("train:forward-")
    assert long != short  # so the limit of a long pass is not learned from short ones
    assert found["moved"]
    assert not found["same"]
    assert not found["after"]
    says = (
        "those of before the session was opened are lost",
        "a part was refused",
        *["there are no gradients"] * 2,
        "the sum of the gradients since the last optimizer step is too large",
        "are not finite in the rows sequence 1",
        "forward_backward failed",
        "are not kept",
        "the tokens are not those of sample",
        "there is no checkpoint of version 77",
    )
    for said, expected in zip(found["refusals"], says, strict=True):
        assert expected in said
    first, largest, length = found["apart"]
    assert (first, length) == (0.0, 0)
    assert largest < 0
    assert found["loss"][0] == pytest.approx(-found["loss"][1], rel=1e-6)
    assert found["half"][0] == pytest.approx(found["half"][1], rel=1e-6)
    assert found["replay"] == 1.0
    assert found["versions"] == [3, 4, 5]
    assert not found["loaded"]
    assert found["steps"] == [0, 1, 2, 3, 4]


def answers(samples: list[Sample]) -> list[dict[str, Any]]:
    """Answers to two prompts as a client of RL sends them. Those to the second prompt have no signal.
    One target of each prompt differs from its token, and so does one of the last answer."""
    found = []
    for number, sample in enumerate(samples[:8]):
        prompt = samples[(1, 3)[number // 4]].token_ids.tolist()[:24]
        answer = sample.token_ids.tolist()[-(5 + number) :]
        advantage = [0.5, -1.0, 2.0, -1.5, 0.0, 0.0, 0.0, 0.0][number]
        pad, tokens = [0.0] * len(prompt), [*prompt, *answer]
        targets = [*tokens[:4], 3, *tokens[5:]]
        targets[-2] = tokens[-2] ^ (number == 7)
        found.append(
            {
                "tokens": tokens,
                "targets": targets,
                "advantages": [*pad, *[advantage] * len(answer)],
                "logprobs": [*pad, *[-5.0] * len(answer)],
            }
        )
    return found


def passes_shared_and_not(path: Path, samples: list[Sample], root: Path) -> dict[str, Any]:
    """The log-probs, gradient norm and shared rows of a pass with and without shared prefixes."""
    mesh = join_mesh(path, {})
    base, found = make_base(path, mesh), dict[str, Any]()
    for shares in ("off", "auto"):
        recipe = recipe_of(path, root / shares)
        train = recipe.train.model_copy(update={"share_prefixes": shares})
        recipe = recipe.model_copy(update={"train": train})
        policy = make(f"a_{shares}", path, mesh, base)
        policy.mount()
        policy.make_optimizer(OptimizerConfig(lr=LR))
        folder = RunFolder(recipe.output_dir)
        folder.open(recipe)
        trainer = SessionTrainer(recipe, mesh, folder, policy, Samples())
        given = operation(
            trainer, "forward_backward", loss="importance_sampling", sequences=answers(samples),
            all_logprobs=True,
        )  # fmt: skip
        stepped = operation(trainer, "optim_step")
        rows = given["metrics"].get("train/shared_tokens", 0)
        found[shares] = [given["logprobs"], given["loss"], stepped["grad_norm"], rows]
        policy.close()
    return found


def test_answers_to_a_prompt_share_its_rows(model_path: Path, tmp_path: Path) -> None:
    arguments = model_path, make_samples(), tmp_path
    (found,) = run_ranks(1, passes_shared_and_not, *arguments, folder=tmp_path / "out")
    (alone, loss, norm, none), (shared, same_loss, same_norm, rows) = found["off"], found["auto"]
    assert none == 0
    # two prompts of 24 tokens, whose last row each answer has for itself; the last answer shares none
    assert rows == (3 + 2) * 23
    for one, other in zip(alone, shared, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
        assert min(one[1:]) < 0
    assert same_loss == pytest.approx(loss, rel=1e-5)
    assert same_norm == pytest.approx(norm, rel=1e-4)
    assert norm > 0


def test_an_sft_loop_of_a_client_has_the_bits_of_sft(model_path: Path, tmp_path: Path) -> None:
    arguments = model_path, {}, make_samples(), tmp_path
    (found,) = run_ranks(1, trained, *arguments, folder=tmp_path / "out")
    check(found)


@pytest.mark.release
@pytest.mark.parametrize("sizes", [{}, {"expert": 2}, {"pipeline": 2}, {"tensor": 2}])
def test_so_has_one_on_two_ranks(sizes: dict[str, int], model_path: Path, tmp_path: Path) -> None:
    arguments = model_path, sizes, make_samples(), tmp_path
    for found in run_ranks(2, trained, *arguments, folder=tmp_path / "out"):
        check(found)
