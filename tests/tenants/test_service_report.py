"""What a service reports of an error in the work of a tenant, without an engine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mrl.config import ServiceConfig
from mrl.engines.base import EngineLost
from mrl.engines.sglang.cause import cause
from mrl.errors import OutOfMemory
from mrl.jobs.out_of_memory import memory_advice_of_service
from mrl.jobs.report import reporting
from mrl.run.failure import lines_of, read_failure
from mrl.system.heartbeat import working_for
from mrl.system.memory_error import noting_bytes


def test_the_report_names_the_tenant_and_the_keys(tmp_path: Path) -> None:
    tree = {"model": {"path": "m"}, "output_dir": str(tmp_path), "lora": {}}
    config = ServiceConfig.model_validate(tree)
    (tmp_path / "service.yaml").touch()
    report = reporting(
        tmp_path,
        "mrl serve again",
        lambda error: memory_advice_of_service(error, config, "mrl serve again"),
        lambda: 7,
    )
    noting = noting_bytes(lambda: "base 8.1 GB")
    with pytest.raises(OutOfMemory), report, noting, working_for("ann", 3):
        raise MemoryError("no room")
    found = read_failure(tmp_path)
    assert found is not None
    assert (found.tenant, found.step, found.exit_code) == ("ann", 3, 77)
    assert found.what == (
        "the trainer ran out of memory in the work of tenant ann (no room). Rank 0 holds: base 8.1 GB. "
        "Change rollout.mem_fraction_static (0.6 now) or tenants.max_micro_batch_tokens (no limit "
        "now), or give that tenant a smaller train.micro_batch_tokens. Continue with: mrl serve again"
    )
    text = "\n".join(lines_of(found))
    assert "step 3, tenant ann" in text
    assert "each tenant's newest checkpoint; the next start continues with all tenants" in text
    killed = EngineLost(f"engine: ended while it started: {cause('', -signal.SIGKILL)}")
    for other in (ValueError("other"), killed):
        assert memory_advice_of_service(other, config, "") is None
