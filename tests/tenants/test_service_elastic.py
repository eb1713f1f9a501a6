"""A service whose engines are added and removed: each tenant has the bits of its run alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.elastic_reward import VARIABLE
from benchmarks.elastic_runs import states
from mrl.cli import main
from mrl.errors import ExitCode, InputError
from mrl.system.files import write_whole
from mrl.toy_model import write_toy_model
from tests.tenants.serving import Service, require_same_bits, rows_of, wait_for
from tests.tenants.test_service_disaggregated import AHEAD, MOMENTARY, ROLLOUT, steps_of

pytestmark = [pytest.mark.release, pytest.mark.timeout(2400)]

STEPS = 20
NAMES = ("ann", "bob")


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def states_of(service: Service) -> dict[int, str]:
    """Return the engines; none while the service starts."""
    try:
        return states(service.folder)
    except InputError:
        return {}


def numbers_of(service: Service, name: str) -> list[float]:
    """Return how many engines worked for a tenant in each step."""
    return [row["rollout/num_engines"] for row in rows_of(service.run_of(name))]


def test_tenants_keep_their_bits_while_engines_come_and_go(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(tmp_path / "service", model, ranks=2)
    service.write(rollout=ROLLOUT)
    pace = tmp_path / "pace"
    for name in NAMES:
        reward = "benchmarks.elastic_reward:reward"
        service.add(name, num_steps=STEPS, reward=reward, **AHEAD[name])
    write_whole(pace, "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(pace))
        process = service.start("--until-done")
    folder = str(service.folder)
    try:
        wait_for(lambda: all(steps_of(service, name) >= 1 for name in NAMES), process)
        assert states_of(service).keys() == {0}
        with pytest.raises(SystemExit) as refused:
            main(["engines", "remove", folder, "0"])
        assert refused.value.code == ExitCode.BAD_INPUT
        write_whole(pace, "8")  # the engine has time to start
        main(["engines", "add", folder])
        wait_for(lambda: all(2.0 in numbers_of(service, name) for name in NAMES), process)
        main(["engines", "remove", folder, "0"])
        assert list(states_of(service)) == [1]
        write_whole(pace, "0")
        assert process.wait(900) == 0
    finally:
        process.kill()
    assert "engine 1 serves" in capsys.readouterr().out
    for name in NAMES:
        service.train_alone(name, tmp_path / name)
        assert numbers_of(service, name)[-1] == 1.0
        assert rows_of(service.run_of(name))[-1]["async/lost_workers"] == 0
        require_same_bits(
            service.run_of(name), tmp_path / name, but=(*MOMENTARY, "rollout/num_engines")
        )
