"""CPU threads: which number a run takes, why, and that it reaches torch and the engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mrl.config import load_recipe
from mrl.engines.sglang.settings import server_environment
from mrl.errors import InputError
from mrl.preflight.threads import choose_threads
from mrl.system import threads
from tests.loop.conftest import TOY_RECIPE


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four cores without a quota, and nothing in the environment."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "none")
    for name in ("OMP_NUM_THREADS", threads.MARK, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("width", "world", "key", "given", "number", "why"),
    [
        (511, 1, "auto", None, 1, "too small"),
        (512, 1, "auto", None, 4, "4 core(s) for 1 rank(s)"),
        (4096, 2, "auto", None, 2, "4 core(s) for 2 rank(s)"),
        (4096, 8, "auto", None, 1, "4 core(s) for 8 rank(s)"),
        (4096, 1, "auto", "3", 3, "OMP_NUM_THREADS"),
        (64, 1, "2", "3", 2, "train.cpu_threads"),
        (4096, 1, "auto", " 3,2 ", 3, "OMP_NUM_THREADS"),
        (4096, 1, "auto", " ", 4, "4 core(s)"),
    ],
)
def test_the_number(
    four_cores, monkeypatch, width: int, world: int, key: str, given: str | None, number: int, why: str
) -> None:  # fmt: skip
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    recipe = load_recipe(TOY_RECIPE, [f"train.cpu_threads={key}"])
    found = choose_threads(recipe, width, world)
    assert found.number == number
    assert why in found.describe()


def test_one_thread_by_mrl_is_not_one_by_the_user(four_cores) -> None:
    before = torch.get_num_threads()
    try:
        assert threads.compute_with_one_thread()
        assert torch.get_num_threads() == 1
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert threads.given_threads() is None
        assert not threads.compute_with_one_thread()
    finally:
        torch.set_num_threads(before)
        del os.environ["OMP_NUM_THREADS"], os.environ[threads.MARK]


@pytest.mark.parametrize("text", ["0", "-1", "many", "1025", "99999999999999999999", ",2"])
def test_a_wrong_number_is_refused(four_cores, monkeypatch, text: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(InputError, match=r"OMP_NUM_THREADS: got .* from 1 to 1024"):
        threads.given_threads()
    with pytest.raises(InputError, match="cpu_threads"):
        load_recipe(TOY_RECIPE, ["train.cpu_threads=1025"])


def test_ranks_of_this_machine_share_its_cores(four_cores, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_threads(load_recipe(TOY_RECIPE, []), 4096, 16).number == 2


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("", 4)]
)
def test_a_quota_limits_the_cores(
    four_cores, monkeypatch, tmp_path: Path, text: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    assert threads.usable_cores() == cores


def test_the_engine_gets_its_threads() -> None:
    assert server_environment((), 1, cpu_threads=3)["OMP_NUM_THREADS"] == "3"
    assert server_environment((), 1)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["two", "0", "9" * 5000])
def test_an_environment_that_is_no_number_is_named(
    four_cores, monkeypatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"{name}: got '{value[:9]}.*expected"):
        choose_threads(load_recipe(TOY_RECIPE, ["train.cpu_threads=auto"]), 4096, 1)
