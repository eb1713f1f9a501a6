"""Named states and samplers of a session, targets apart from the tokens, and gradients of a client's
own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from mrl.config import OptimizerConfig
from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.service.sessions import samplers, saved
from mrl.service.sessions.samples import Samples
from mrl.service.sessions.trainer import SessionTrainer
from mrl.types import Sample
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh
from parallel.optimizer.state import get_step
from parallel.policy import Policy
from tests.parallel.conftest import make_samples, write_model
from tests.parallel.layouts import exported, join_mesh
from tests.parallel.lora.tenants import differences, make, make_base, state
from tests.ranks import run_ranks
from tests.tenants.test_session_training import operation, recipe_of

ADAM = OptimizerConfig(lr=1e-2)


@pytest.fixture(scope="module")
def model_path(made_once: Callable[..., Path]) -> Path:
    return made_once("untied", write_model)


def opened(path: Path, mesh: Mesh, root: Path, policy: Policy) -> tuple[SessionTrainer, Samples]:
    recipe = recipe_of(path, root).model_copy(update={"optimizer": ADAM})
    policy.mount()
    policy.make_optimizer(ADAM)
    folder, kept = RunFolder(recipe.output_dir), Samples()
    if mesh.rank == 0:
        folder.open(recipe)
    return SessionTrainer(recipe, mesh, folder, policy, kept), kept


def one_step(trainer: SessionTrainer, tokens: list[int]) -> None:
    operation(trainer, "forward_backward", loss="cross_entropy", sequences=[{"tokens": tokens}])
    operation(trainer, "optim_step")


def refusal(trainer: SessionTrainer, kind: str, **keys: Any) -> str:
    with pytest.raises(InputError) as error:
        operation(trainer, kind, **keys)
    return str(error.value)


def trained_on_targets(
    path: Path, sizes: dict[str, int], samples: list[Sample], root: Path
) -> dict[str, Any]:
    """What operations give that name other targets than the tokens, or log-probs of all tokens."""
    mesh = join_mesh(path, sizes)
    policy = make("b", path, mesh, make_base(path, mesh))
    trainer, kept = opened(path, mesh, root / "run", policy)
    one_step(trainer, samples[1].token_ids.tolist())  # else B = 0, and A has no gradient
    gradients = trainer._gradients
    tokens = samples[0].token_ids.tolist()
    longer = samples[2].token_ids.tolist()
    others = [(t * 7 + 3) % 50 for t in tokens]
    found: dict[str, Any] = {}

    def passed(loss: str, *sequences: dict[str, Any], **keys: Any) -> tuple[Any, Any]:
        """The result and the gradients of one pass."""
        result = operation(trainer, "forward_backward", loss=loss, sequences=[*sequences], **keys)
        sums = [each.clone() for each in gradients._sums]
        gradients.clear()
        return result, sums

    def scored(**sequence: Any) -> list[float]:
        given = [{"tokens": longer}, {"tokens": tokens, **sequence}]
        return operation(trainer, "forward", sequences=given)["logprobs"][1]

    # The log-prob of another token at place t is that of the sequence that has it there.
    at = len(tokens) - 1
    changed = [*tokens[:at], others[at]]
    found["targets"] = [scored(targets=others)[at], scored(tokens=changed)[at]]
    found["same"] = [scored(targets=tokens), scored()]
    weights = [0.0, *(0.5 * (-1) ** t for t in range(1, len(tokens)))]
    weighted = {"tokens": tokens, "targets": others, "weights": weights}
    result, sums = passed("cross_entropy", weighted)
    logprobs = scored(targets=others)
    found["loss"] = [result["loss"], -sum(w * p for w, p in zip(weights, logprobs, strict=True))]
    opposite, negated = passed("linear", {**weighted, "weights": [-w for w in weights]})
    found["linear"] = [opposite["loss"] - result["loss"], differences(negated, sums)]
    result, every = passed("cross_entropy", weighted, all_logprobs=True)
    found["apart"] = max(float((a - b).abs().max()) for a, b in zip(every, sums, strict=True))
    found["size"] = max(float(each.abs().max()) for each in sums)
    found["all"] = [result["logprobs"][0], logprobs]
    few = {"tokens": tokens, "weights": [0.0] * (len(tokens) - 1) + [1.0]}
    found["few"] = [sum(p != 0 for p in passed("cross_entropy", few)[0]["logprobs"][0])]
    found["few"].append(
        sum(p != 0 for p in passed("cross_entropy", few, all_logprobs=True)[0]["logprobs"][0])
    )
    nothing = {"tokens": tokens, "weights": [0.0] * len(tokens)}
    result, zeros = passed("cross_entropy", nothing, all_logprobs=True)
    found["nothing"] = [result["loss"], any(bool(each.any()) for each in zeros)]
    # Routes of samples with the same tokens, by name or not.
    kept.keep("x-1/0/0", samples[0])
    ratio = {"tokens": tokens, "advantages": [1.0] * len(tokens), "logprobs": [0.0] * len(tokens)}
    named, wanted = passed("gspo", {**ratio, "sample": "x-1/0/0"})
    matched, got = passed("gspo", ratio, replay="match")
    mixed, _ = passed("gspo", ratio, {**ratio, "tokens": changed}, replay="match")
    found["match"] = [named["loss"] - matched["loss"], differences(got, wanted)]
    strange = {**ratio, "tokens": changed, "sample": "y-1/0/0"}
    found["never"] = passed("ppo", strange, replay="match")[0]["metrics"]["session/native_rows"]
    rows = ("session/replayed_rows", "session/native_rows")
    found["rows"] = [[each["metrics"][key] for key in rows] for each in (named, matched, mixed)]
    return found


def test_targets_weights_and_routes(model_path: Path, tmp_path: Path) -> None:
    samples = make_samples()
    (found,) = run_ranks(
        1, trained_on_targets, model_path, {}, samples, tmp_path, folder=tmp_path / "out"
    )
    size = len(samples[0].token_ids)
    assert found["targets"][0] == pytest.approx(found["targets"][1], rel=1e-5)
    assert found["same"][0] == found["same"][1]
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-5)
    assert found["linear"] == [pytest.approx(0, abs=1e-9), []]
    assert found["apart"] < 1e-5 * found["size"]
    assert found["all"][0] == pytest.approx(found["all"][1], rel=1e-5)
    assert found["few"] == [1, size - 1]
    assert found["nothing"] == [0.0, False]
    assert found["never"] == size - 1
    assert found["match"] == [pytest.approx(0, abs=1e-9), []]
    assert found["rows"] == [[size - 1, 0], [size - 1, 0], [size - 1, size - 1]]


def sampled(trainer: SessionTrainer, policy: Policy, name: str | None) -> dict[str, Any]:
    """What an engine is sent for the samples of a sampler."""
    version = trainer.samplers.version_of(name)
    policy.mount(adapter_only=True)
    with trainer.samplers.in_place(trainer.samplers.source(name, version, trainer.version)):
        return exported(policy)


def saved_and_loaded(
    path: Path, sizes: dict[str, int], samples: list[Sample], root: Path
) -> dict[str, Any]:
    mesh = join_mesh(path, sizes)
    base = make_base(path, mesh)
    policy = make("b", path, mesh, base)
    trainer, _ = opened(path, mesh, root / "run", policy)
    tokens = samples[1].token_ids.tolist()
    one_step(trainer, tokens)
    found: dict[str, Any] = {"says": []}
    first, whole = exported(policy), state(policy)
    answers = [operation(trainer, "save", name="one"), operation(trainer, "save_sampler", name="s")]
    found["answers"] = [[each["version"], each["name"]] for each in answers]
    found["present"] = trainer.samplers.source("s", 1, trainer.version).name
    one_step(trainer, tokens)
    later = exported(policy)
    found["moved"] = bool(differences(later, first))
    places = [Path(each["folder"]) for each in answers]
    found["kinds"] = [{key.partition(".")[0] for key in SavedTensors(each)} for each in places]
    found["listed"] = [
        [
            (each.name, each.version, each.folder == place)
            for each in saved.saved(root / "run", kind)
        ]
        for kind, place in zip(("states", "samplers"), places, strict=True)
    ]

    found["sampler"] = differences(sampled(trainer, policy, "s"), first)
    trainer.samplers._on_host.clear()
    found["sampler"] += differences(sampled(trainer, policy, "s"), first)
    found["label"] = astuple(trainer.samplers.source("s", 1, trainer.version))
    found["none"] = differences(sampled(trainer, policy, None), later)
    found["base"] = any(bool(e.any()) for e in sampled(trainer, policy, "@base").values())
    for number in range(samplers.MAX_ON_HOST + 1):
        operation(trainer, "save_sampler", name=f"t{number}")
    found["sampler"] += differences(sampled(trainer, policy, "s"), first)
    found["restored"] = differences(exported(policy), later)
    says = found["says"].append
    says(refusal(trainer, "save", name="one"))
    says(refusal(trainer, "save_sampler", name="s"))
    says(refusal(trainer, "load", name="two"))
    says(refusal(trainer, "load", folder=answers[1]["folder"]))
    says(refusal(trainer, "load", folder=str(root / "run")))
    with pytest.raises(InputError) as error:
        trainer.samplers.version_of("u")
    says(str(error.value))
    found["untouched"] = differences(exported(policy), later)
    found["loaded"] = operation(trainer, "load", name="one")["version"]
    found["whole"] = differences(state(policy), whole)
    found |= loaded_otherwise(path, mesh, base, root, trainer, policy, tokens)
    assert not differences(found.pop("first"), first)
    assert not differences(found.pop("whole_there"), whole)
    return found


def loaded_otherwise(
    path: Path,
    mesh: Mesh,
    base: SharedBase,
    root: Path,
    trainer: SessionTrainer,
    policy: Policy,
    tokens: list[int],
) -> dict[str, Any]:
    """What else can be done with the state `one` and the sampler `s` of version 1."""
    found: dict[str, Any] = {}
    run = root / "run"
    places = [
        str(saved.require(run, "states", "one")),
        str(saved.require(run, "samplers", "s")),
    ]
    # Without the optimizer: these weights, and an Adam at its beginning.
    one_step(trainer, tokens)
    operation(trainer, "load", name="one", optimizer=False)
    found["first"] = first = exported(policy)
    found["adam"] = get_step(policy.optimizer)
    # Another session of the same adapter takes both.
    other = make("b2", path, mesh, base)
    also, _ = opened(path, mesh, root / "other", other)
    operation(also, "load", folder=places[1], optimizer=False)
    found["others"] = differences(exported(other), first)
    operation(also, "load", folder=places[0])
    found["whole_there"] = state(other)
    strange = make("a", path, mesh, base)
    third, _ = opened(path, mesh, root / "third", strange)
    before = exported(strange)
    found["strange"] = refusal(third, "load", folder=places[0])
    found["others"] += differences(exported(strange), before)
    # The same name again.
    policy.mount()
    one_step(trainer, tokens)
    operation(trainer, "save", name="one", overwrite=True)
    operation(trainer, "save_sampler", name="s", overwrite=True)
    newest = exported(policy)
    one_step(trainer, tokens)
    found["replaced"] = differences(sampled(trainer, policy, "s"), newest)
    found["second"] = trainer.samplers.source("s", 0, trainer.version).label
    operation(trainer, "load", name="one")
    found["again"] = differences(exported(policy), newest)
    if mesh.rank == 0:
        found["one"] = len(list((root / "run/states/one").glob("iter_*")))
        found["gone"] = [saved.remove_saved(root / "run", "samplers", "s") for _ in range(2)]
    return found


def check_saves(found: dict[str, Any]) -> None:
    assert found["answers"] == [[1, "one"], [1, "s"]]
    assert found["present"] is None  # the weights have not changed since
    assert found["moved"]
    kinds = {"model", "exp_avg", "exp_avg_sq", "random"}
    assert found["kinds"] == [kinds, {"model", "random"}]
    assert found["listed"] == [[("one", 1, True)], [("s", 1, True)]]
    assert not found["sampler"]
    name, label, version = found["label"]
    assert (name, version) == ("s", 1)
    assert samplers.FIRST_LABEL <= label < found["second"]
    assert not found["replaced"]
    assert "adapter" in found["strange"]
    assert not found["none"]
    assert not found["base"]
    assert not found["restored"]
    says = (
        "there is a state 'one' already",
        "there is a sampler 's' already",
        "there is no state 'two' of this session; there are: one",
        "is a sampler, which has no optimizer state",
        "there is no checkpoint in",
        "there is no sampler 'u' of this session; there are: s, t0",
    )
    for said, expected in zip(found["says"], says, strict=True):
        assert expected in said
    assert not found["untouched"]
    assert found["loaded"] == 3
    assert not found["whole"]
    assert found["adam"] == 0
    assert not found["others"]
    assert not found["again"]


def test_named_states_and_samplers(model_path: Path, tmp_path: Path) -> None:
    arguments = model_path, {}, make_samples(), tmp_path
    (found,) = run_ranks(1, saved_and_loaded, *arguments, folder=tmp_path / "out")
    check_saves(found)
    assert found["one"] == 1
    assert found["gone"] == [True, False]


@pytest.mark.release
@pytest.mark.parametrize("sizes", [{"expert": 2}, {"pipeline": 2}, {}], ids=["EP2", "PP2", "DP2"])
def test_so_they_are_on_two_ranks(sizes: dict[str, int], model_path: Path, tmp_path: Path) -> None:
    arguments = model_path, sizes, make_samples(), tmp_path
    for found in run_ranks(2, saved_and_loaded, *arguments, folder=tmp_path / "out"):
        check_saves(found)


def test_a_damaged_sampler_is_not_listed(tmp_path: Path) -> None:
    folder = tmp_path / "samplers/x/iter_0000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert saved.saved(tmp_path, "samplers") == []
    assert saved.describe(tmp_path, "samplers", "y") is None
    with pytest.raises(InputError, match="is no name of a sampler"):
        saved.remove_saved(tmp_path, "samplers", "../x")
