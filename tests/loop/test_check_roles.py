"""`mrl check --plan` of a disaggregated recipe: the bytes of both roles, and which side waits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.scaling import CASES, read_case
from mrl.commands.placement_table import planned_tables
from mrl.config import load_recipe
from mrl.planner.engine import engine_weight_bytes
from mrl.planner.expected_times import expected_times
from mrl.planner.hardware import HARDWARE
from mrl.planner.roles import all_phases, nodes, split_engine
from mrl.planner.rows import Phase, total
from mrl.planner.verdict import verdict
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims
from tests.loop.conftest import REPOSITORY, TOY_RECIPE
from tests.loop.test_check_plan import LAYOUT, planned, qwen  # noqa: F401
from tests.loop.test_refusals import refused

CASE = next(case for case in CASES if case.recipe == "qwen3_30b_a3b_8x141gb")
GPU = HARDWARE[CASE.gpu]
"""Qwen3-30B-A3B: 8 H200 that train, and here as many that generate."""
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=8")


def read(*keys: str):
    """Return shape, layout and work of 8 trainer ranks and 8 rollout ranks."""
    return read_case(CASE, *APART, *keys)


def by_role(work: Workload, dims: ParallelDims) -> tuple[dict[str, Phase], Phase]:
    shape = read()[0]
    found = all_phases(shape, dims, work, GPU)
    return {phase.name: phase for phase in found if phase.role == "trainer"}, found[-1]


def test_each_role_holds_its_own_bytes_alone() -> None:
    shape, dims, work = read()
    trainer, rollout = by_role(work, dims)
    assert list(trainer) == ["sync", "log-probs", "train", "update"]
    for phase in trainer.values():
        names = {row.name for row in phase.device}
        assert not names & {"engine weights", "KV cache", "CUDA graphs", "engine's communicators"}
        assert {"weights", "gradients"} <= names  # nothing leaves the device while weights are sent
    assert trainer["sync"].device_row("sync buffers") > 0
    assert rollout.device_row("engine weights") == engine_weight_bytes(shape, work)
    assert not rollout.device_row("weights")
    assert not rollout.device_row("gradients")
    colocated = dataclasses.replace(work, rollout_ranks=0)
    together = {phase.name: phase for phase in all_phases(shape, dims, colocated, GPU)}
    assert trainer["train"].device_row("activations") == together["train"].device_row("activations")
    assert rollout.device_row("KV cache") == together["rollout"].device_row("KV cache")


def test_every_byte_of_both_roles_has_a_formula_and_a_source() -> None:
    shape, dims, work = read("async.max_staleness=2", "async.deterministic=true")
    held = all_phases(shape, dims, work, GPU)
    on_nodes = nodes(shape, dims, work, GPU)
    rows = [row for phase in held for row in phase.device]
    rows += [row for node in on_nodes for row in node.rows]
    for row in rows:
        assert row.num_bytes > 0
        assert row.formula
        assert row.source
    for phase in held:
        assert len({row.name for row in phase.device}) == len(phase.device)


@pytest.mark.parametrize(
    ("keys", "versions"),
    [
        ((), 1),
        (("async.max_staleness=1", "async.deterministic=true"), 1),
        (("async.max_staleness=4", "async.deterministic=true"), 4),
        (("async.max_staleness=1",), 2),
        (("async.max_staleness=4",), 2),
    ],
)
def test_a_node_of_engines_has_room_for_the_versions_of_each(
    keys: tuple[str, ...], versions: int
) -> None:
    shape, dims, work = read(*keys)
    trainers, engines = nodes(shape, dims, work, GPU)
    assert (trainers.num_trainers, trainers.num_rollout) == (8, 0)
    assert (engines.num_trainers, engines.num_rollout) == (0, 8)
    (staged,) = (row for row in engines.rows if row.name == "rollout: staged weights")
    num_engines = 8 // work.engine_tp
    assert staged.num_bytes == num_engines * versions * 2 * shape.num_parameters
    names = {row.name for row in trainers.rows}
    assert "server: samples of all engines" in names
    assert not names & {"weights, pinned", "optimizer, pinned", "rollout: staged weights"}


def test_a_node_of_both_roles_holds_both() -> None:
    shape, dims, work = read_case(CASE, "rollout.placement=disaggregated", "rollout.num_ranks=2")
    first, *others = nodes(shape, dims, work, dataclasses.replace(GPU, gpus_per_node=16))
    assert not others
    assert first.describe() == "8 trainer rank(s) and 2 rollout rank(s)"
    apart = nodes(shape, dims, work, GPU)
    assert [node.describe() for node in apart] == ["8 trainer rank(s)", "2 rollout rank(s)"]
    assert total(first.rows) == sum(total(node.rows) for node in apart)


def test_an_engine_on_two_nodes_is_refused() -> None:
    shape, dims, work = read()
    assert split_engine(dims, work, 8) == ""
    assert "ranks 8 to 9 would be on two nodes of 3 GPUs" in split_engine(dims, work, 3)
    small = dataclasses.replace(GPU, gpus_per_node=3)
    found = verdict(shape, dims, dataclasses.replace(work, engine_tp=2), small)
    assert not found.runs


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_the_table_is_made_of_the_parts(bound: int) -> None:
    keys = (f"async.max_staleness={bound}",) if bound else ()
    shape, dims, work = read(*keys)
    path = REPOSITORY / "launch" / "recipes" / f"{CASE.recipe}.yaml"
    recipe = load_recipe(path, [*APART, *keys])
    found = expected_times(shape, dims, work, GPU, work.response_len // 4)
    parts = {role: sum(p.seconds for p in found.parts if p.role == role) for role in
             ("rollout", "trainer", "sync", "load")}  # fmt: skip
    assert parts["rollout"] == pytest.approx(found.times.generate_s)
    assert sum(parts.values()) == pytest.approx(found.times.total_s)
    assert all(seconds > 0 for seconds in parts.values())
    assert found.spread > 1.5
    whole = expected_times(shape, dims, work, GPU, work.response_len)
    assert whole.spread == 1.0
    assert whole.times.generate_s > found.times.generate_s
    assert whole.times.train_s > 2 * found.times.train_s
    tables, says = planned_tables(recipe, shape, dims, work, GPU, work.response_len // 4)
    rows = [row[0] for row in tables[-1].rows]
    bounds = [f"asynchronous, bound {n}" for n in (1, 2, 4)]
    assert rows[1:] == ["synchronous", *bounds]
    assert f"async.max_staleness {bound}" in says
    assert "wait" in says


def test_more_engines_generate_faster_and_are_sent_more() -> None:
    shape, dims, work = read()
    more = dataclasses.replace(work, rollout_ranks=32)
    few, many = (
        expected_times(shape, dims, each, GPU, each.response_len).times for each in (work, more)
    )
    assert many.generate_s < few.generate_s
    assert many.train_s == few.train_s
    assert many.sync_s > few.sync_s


def test_the_plan_shows_both_roles(
    qwen: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--plan", "--gpus", "16", "--gpu", "h200", f"model.path={qwen}", *LAYOUT, *APART)
    out = planned(capsys, *arguments, "async.max_staleness=2", "--response-len", "1024")
    for text in ("ranks 0 to 7 for training, ranks 8 to 15 for rollout", "Below: 16 x H200",
                 "GPU memory of one trainer rank by phase", "GPU memory of one rollout rank by phase",
                 "rollout: staged weights", "Seconds of each role", "asynchronous, bound 2",
                 "with async.max_staleness 2 the "):  # fmt: skip
        assert text in out
    assert out.strip().splitlines()[-1].startswith("fits: the peak is ")
    titles = re.findall(
        r"^(?:GPU memory at the peak|Host memory of one node).*$", out, re.MULTILINE
    )
    assert len(titles) == 4
    for title in titles:
        table = out[out.index(title) :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
        numbers = [int(n) for line in table for n in re.findall(r" {2,}(\d+) {2,}", line[:60])]
        assert len(numbers) > 3
        assert sum(numbers[:-1]) == numbers[-1], title


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["--gpu", "h100"], r"does not fit: train on a trainer rank needs .* \+ gradients "),
        (
            ["--host-memory", "200", "checkpoint.async_save=false"],
            r"a node needs .* of host memory, .*: rollout: staged weights ",
        ),
        (["rollout.mem_fraction_static=0.1"], "its weights need "),
        (["rollout.mem_fraction_static=0.97"], "does not fit: a rollout rank needs .*KV cache"),
        (["--response-len", "5000"], "--response-len: got 5000, expected 1 to .* 4096"),
        (["--gpus", "8"], "start at least 9, so that one trains"),
        (["--measured", "nowhere"], "nowhere is a folder without config.yaml"),
    ],
)
def test_refusals_come_with_the_arithmetic(
    keys: list[str],
    says: str,
    qwen: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["check", str(TOY_RECIPE), f"model.path={qwen}", *LAYOUT, *APART, "--plan", "--gpus",
               "16", "--gpu", "h200", "async.max_staleness=2", *keys]  # fmt: skip
    assert re.search(says, refused(capsys, command))
