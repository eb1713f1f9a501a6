"""A service whose base model is dense: what it needs, and what only a MoE has."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.load import load_service
from mrl.errors import InputError
from mrl.preflight.roles import roles_of_engines
from mrl.service.agreement import resolve_tenant
from mrl.service.build import service_dims
from tests.loop.test_architectures import write_model
from tests.tenants.serving import Service, rows_of

DENSE = {"moe": {"capture_routes": False}}
LORA = {"lora": {"max_rank": 8}}
OFF = {"moe": {"routing_replay": "off"}, "lora": {"rank": 4}}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    write_model("llama", tmp_path / "model")
    return Service(tmp_path / "service", tmp_path / "model")


def starts(service: Service, **keys: object) -> None:
    """What `mrl serve` checks before it loads the model."""
    service.write(**keys)
    config = load_service(service.config)
    service_dims(config, roles_of_engines(config.rollout_config(), 1))


def test_what_only_a_moe_has_is_refused_with_its_key(service: Service) -> None:
    with pytest.raises(InputError, match=r"moe.capture_routes is true, but .*set it to false"):
        starts(service, **LORA)
    balanced = {"moe": {"capture_routes": False, "z_loss_coeff": 0.1}}
    with pytest.raises(InputError, match=r"moe.z_loss_coeff is 0.1, but .* has no MoE layers"):
        starts(service, **LORA, **balanced)
    starts(service, **LORA, **DENSE)
    config = load_service(service.config)
    with pytest.raises(InputError, match=r"capture_routes=false; set moe.routing_replay=off"):
        resolve_tenant(config, service.recipe("ann", 1, lora={"rank": 4}), "ann")
    own = {**OFF, "moe": {"routing_replay": "r2"}}
    with pytest.raises(
        InputError, match=r"routing_replay is r2, but .* no MoE layers; set it to off"
    ):
        resolve_tenant(config, service.recipe("ann", 1, **own), "ann")
    assert resolve_tenant(config, service.recipe("ann", 1, **OFF), "ann").lora is not None


@pytest.mark.release
def test_a_dense_base_serves_two_tenants(service: Service) -> None:
    service.write(rollout={"context_len": 64, "max_total_tokens": 2048}, **LORA, **DENSE)
    for name, targets in (("ann", "attention"), ("bob", ["q_proj", "o_proj"])):
        service.add(name, num_steps=2, **{**OFF, "lora": {"rank": 4, "targets": targets}})
    service.run()
    assert service.states() == {"ann": ("done", ""), "bob": ("done", "")}
    for name in ("ann", "bob"):
        rows = rows_of(service.run_of(name))
        assert [row["step"] for row in rows] == [0, 1]
        assert all(0 < row["mismatch/logprob_abs_max"] < 1e-4 for row in rows)
        assert not any(key.startswith("routing/") for key in rows[0])
