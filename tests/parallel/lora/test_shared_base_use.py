"""How a shared base is used, and misused: refusals, failures, memory, random states, checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.routes import Replay
from mrl.config import LoraConfig
from mrl.errors import InputError
from mrl.types import LossOutput, Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.random_state import pack_random_state
from parallel.hf_config import HfModel
from parallel.ledger import optimizer_tensors
from parallel.lora.rules import read_adapter
from parallel.lora.shared_base import SharedBase
from parallel.lora.weights import LoraSetup
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.layouts import exported, join_mesh, ready_batch
from tests.parallel.lora.tenants import differences, make, make_base, state, step
from tests.ranks import run_ranks


def shape(base: SharedBase) -> list[str]:
    """What the modules of a base are made of: an adapter, a hook or a replay would show."""
    return [
        f"{name}: {type(module).__name__}, {len(module._forward_hooks)} hooks, "
        f"{len(module._forward_pre_hooks)} before, {getattr(module, 'router_replay', None)}"
        for chunk in base.chunks
        for name, module in chunk.named_modules()
    ]


def refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def under_reference(policy: Policy) -> None:
    with policy.reference():
        pass


def refusals(path: Path, mesh: Mesh, root: Path) -> dict[str, str]:
    base = make_base(path, mesh)
    a, b = (make(name, path, mesh, base) for name in "ab")
    store = Checkpoints(root, mesh, keep=1)
    calls: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "pass": (RuntimeError, lambda: a.forward_only([], Replay.off)),
        "reference": (RuntimeError, lambda: under_reference(a)),
        "optimizer": (RuntimeError, lambda: a.make_optimizer(a._optimizer_config)),  # pyright: ignore
        "onload": (RuntimeError, a.onload),
        "unmount": (RuntimeError, a.unmount),
        "save": (RuntimeError, lambda: store.save(1, a, {})),
        "export": (RuntimeError, lambda: exported(a)),
        "dtype": (InputError, lambda: make("c", path, mesh, base, "bfloat16")),
        "name": (ValueError, lambda: make("b", path, mesh, base)),
        "no name": (ValueError, lambda: base.take(make("a", path, mesh), 0)),
        "alone": (RuntimeError, lambda: make("a", path, mesh).mount()),
    }

    found = {name: refusal(kind, call) for name, (kind, call) in calls.items()}
    a.close()
    found["closed"] = refusal(RuntimeError, a.mount)
    again = make("a", path, mesh, base)
    a.close()  # of the old one: the new one is still there
    found["again"] = refusal(RuntimeError, a.mount)
    exported(again)
    again.close()
    base.unmount()
    found["none"] = refusal(RuntimeError, lambda: b.forward_only([], Replay.off))
    return found


def test_what_is_not_mounted_or_does_not_fit_is_refused(model_path: Path, tmp_path: Path) -> None:
    def run(path: Path) -> dict[str, str]:
        return refusals(path, join_mesh(path, {}), tmp_path / "c")

    (found,) = run_ranks(1, run, model_path, folder=tmp_path)
    for name in ("pass", "reference", "optimizer", "onload", "unmount", "save"):
        assert found[name] == "policy 'a' is not mounted, 'b' is; call mount() first", name
    assert (
        "expected ('a/parameters',) on the device, got {'a/parameters': 'host'}" in found["export"]
    )
    assert "model.dtype: got torch.bfloat16, but the base" in found["dtype"]
    assert "got 'b', there are ['a', 'b']" in found["name"]
    assert "got '', there are ['a', 'b']" in found["no name"]
    assert "always mounted" in found["alone"]
    assert found["closed"] == "policy 'a' is closed, there are ['b']"
    assert found["again"] == "policy 'a' is closed, there are ['b', 'a']"
    assert found["none"] == "policy 'b' is not mounted, no policy is; call mount() first"


def broken_loss(logprobs: torch.Tensor, batch: Any) -> LossOutput:
    raise KeyError("of a tenant")


def with_bad_folder(path: Path, mesh: Mesh, base: SharedBase, folder: Path) -> None:
    model = HfModel.read(path)
    adapter = read_adapter(LoraConfig(rank=2), model)
    config, optimizer = base.setup.config, None
    Policy(
        model, mesh, config, optimizer, recompute=True, temperature=1.0, logprob_chunk_tokens=24,
        lora=LoraSetup(adapter, path=folder), base=base, name="bad",
    )  # fmt: skip


def tensor_bytes() -> int:
    """The bytes of all storages that Python can reach."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            storage = one.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def times_given_back(base: SharedBase, policy: Policy) -> list[int]:
    """How often memory went back to the driver until a swap and the end of `unmount`, and until the
    base has made room for the engine."""
    times: list[int] = []
    base.ledger.give_back = lambda: times.append(1)
    policy.mount()
    base.unmount()
    found = [len(times)]
    base.offload()
    del base.ledger.give_back
    return [*found, len(times)]


def life(path: Path, samples: list[Sample], root: Path) -> dict[str, Any]:
    """Two policies, with everything around them that could reach the other."""
    mesh = join_mesh(path, {})
    own = make("b", path, mesh)
    expected = [{**step("b", own, mesh, samples), **state(own)} for _ in range(3)]
    own.close()
    base = make_base(path, mesh)
    plain = shape(base)
    b, a = make("b", path, mesh, base), make("a", path, mesh, base)
    found: dict[str, Any] = {}

    b.mount()
    before = pack_random_state(mesh.device)
    steps = [{**step("b", b, mesh, samples), **state(b)}]
    found["draws"] = not torch.equal(pack_random_state(mesh.device), before)

    a.mount()
    torch.rand(5)
    batch, _ = ready_batch(a, mesh, samples[:4])
    refusal(KeyError, lambda: a.train_step(batch, broken_loss, Replay.rollout))
    count = base.ledger.where()
    refusal(InputError, lambda: with_bad_folder(path, mesh, base, root / "nothing"))
    found["after a refusal"] = sorted(base.ledger.where().keys() ^ count.keys())
    b.mount()
    found["random"] = torch.equal(pack_random_state(mesh.device), before)
    steps.append({**step("b", b, mesh, samples), **state(b)})

    found["given back"] = times_given_back(base, a)
    found["shape"] = shape(base) == plain
    base.ledger.to_host("base")
    found["bytes"] = [b.mount(adapter_only=True).num_bytes, base.ledger.where()["b/parameters"][0]]
    found["export"] = differences(exported(b), expected[1]["adapter"])
    found["away"] = refusal(RuntimeError, lambda: b.forward_only([], Replay.off))
    found["rest"] = b.mount().num_bytes
    found["where"] = {kind: list(count) for kind, count in b.where().items()}

    sizes = []
    for _ in range(3):
        other = make("c", path, mesh, base)
        step("c", other, mesh, samples)
        held = [*other._parameter_tensors(), *optimizer_tensors(other.optimizer)]
        other.close()
        found["held"] = sum(tensor.untyped_storage().nbytes() for tensor in held)
        del other, held
        b.mount()
        sizes.append(tensor_bytes())
        b.unmount()
    found["sizes"] = sizes
    b.mount()
    steps.append({**step("b", b, mesh, samples), **state(b)})
    found["different"] = differences(steps, expected)
    a.close()
    b.close()
    base.close()
    found["host"] = base.ledger.host_buffer_bytes
    return found


def test_nothing_of_one_policy_reaches_another(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    (found,) = run_ranks(1, life, model_path, samples, tmp_path, folder=tmp_path)
    assert found["different"] == []
    assert found["after a refusal"] == []
    assert not found["draws"]  # no step needs random numbers
    assert found["random"]  # and what another draws is not missed
    assert found["shape"]
    # The next policy takes the memory of the one before; then the engine gets all of it.
    assert found["given back"] == [0, 1]
    assert found["bytes"][0] == found["bytes"][1] > 0
    assert found["export"] == []
    assert "got {'base': 'host'}" in found["away"]
    assert found["rest"] > found["bytes"][0]
    assert set(found["where"]) == {"parameters", "gradients", "optimizer"}
    assert all(
        device > 0 and not host and not freed for device, host, freed in found["where"].values()
    )
    assert found["sizes"][2] == found["sizes"][1]
    assert found["held"] == found["host"] == 0  # no bytes, whoever still holds the tensors


def exchange(path: Path, samples: list[Sample], root: Path) -> dict[str, list[str]]:
    """A checkpoint of a policy over a base goes to one of its own, and the other way round."""
    mesh = join_mesh(path, {})
    base = make_base(path, mesh)
    makers: dict[str, Callable[[], Policy]] = {
        "shared": lambda: make("c", path, mesh, base),
        "alone": lambda: make("c", path, mesh),
    }
    found = {}
    for name, there in (("shared", "alone"), ("alone", "shared")):
        policy, store = makers[name](), Checkpoints(root / name, mesh, keep=1)
        step("c", policy, mesh, samples)
        store.save(1, policy, {})
        saved = state(policy)
        step("c", policy, mesh, samples)
        expected = state(policy)
        policy.close()
        resumed = makers[there]()
        store.load(1, resumed)
        found[f"{name} loaded"] = differences(state(resumed), saved)
        step("c", resumed, mesh, samples)
        found[f"{name} trained"] = differences(state(resumed), expected)
        resumed.close()
    return found


@pytest.mark.release
def test_checkpoints_go_between_a_shared_base_and_one_of_its_own(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    (found,) = run_ranks(1, exchange, model_path, samples, tmp_path / "c", folder=tmp_path)
    assert found == {key: [] for key in found}
    assert len(found) == 4
