"""The live page of a service and of a tenant, most of it in a real browser."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrl.run.json_lines import add_line
from mrl.service.registry import Registry
from mrl.view.live.server import LiveServer
from mrl.view.live.service_page import ServicePage
from tests.tenants.parts import make_model, service, tenant
from tests.view.browser import open_browser
from tests.view.invented import HOSTILE, metrics
from tests.view.live.test_page import says, write_phase
from tests.view.test_service import add, fill, round_of


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("tenants_model", make_model)


@pytest.fixture
def registry(tmp_path: Path, model: Path) -> Iterator[Registry]:
    with Registry(service(tmp_path, model)) as made:
        yield made


def test_tenants_come_train_and_leave(registry: Registry) -> None:
    root = fill(registry)
    write_phase(root, "rollout", 2, finished=3, wanted=9, host="another")
    with LiveServer([root]) as server, open_browser() as page:
        page.view(1440, 900)
        page.go(server.url)
        says(page, "#tenant-table", "ann")
        says(page, "#tenant-table", HOSTILE[0])  # why cec is paused
        says(page, "#phase", "3 of 9 samples finished")
        assert page.count("#tenant-table tbody tr") == 5
        rows = "[...document.querySelectorAll('#tenant-table tr')]"
        row = f"{rows}.find((each) => each.innerText.startsWith('ann'))"
        before = page.evaluate(f"window.row = {row}; row.innerText")
        ann = registry.root / "runs/ann/metrics.jsonl"
        add_line(ann, {"step": 2, "reward/mean": 0.875, "response_len/mean": 31.0})
        (root / "metrics.jsonl").write_bytes((root / "metrics.jsonl").read_bytes() + b"\n")
        add_line(root / "metrics.jsonl", round_of(7, "ann"))
        says(page, "#state", "4 rounds")
        says(page, "#tenant-table", "0.875")
        assert page.evaluate("row.isConnected && row.innerText") != before
        add(registry, "eve")
        says(page, "#tenant-table", "eve")
        registry.move("eve", "removed")
        says(page, "#tenant-table", "removed")
        assert page.count("#curves .chart") > 5
        write_phase(root, "train", 3, tenant="ann")
        says(page, "#phase", "tenant ann, its step 3")
        assert page.errors == []
        page.click("#tenant-table a")
        says(page, "h1", "ann: ")
        says(page, "#state", "3 steps")
        says(page, "#phase", "training")
        add_line(ann, metrics(3))
        says(page, "#state", "4 steps")
        registry.move("ann", "paused", "a reason")
        says(page, "#state-note", "the tenant is paused: a reason")
        page.evaluate("document.querySelector('nav a').click()")
        says(page, "#tenant-table", "bob")
        assert page.errors == []


def test_files_of_removed_tenants_are_seldom_looked_at(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(registry, "ann", *(f"gone{n}" for n in range(4)))
    for number in range(4):
        registry.move(f"gone{number}", "removed")
    add_again(registry, "gone0")
    registry.move("gone0", "removed")
    page, looked = ServicePage(registry.root), list[Path]()
    page.poll()
    stat = Path.stat

    def counted(path: Path, **more: bool) -> os.stat_result:
        looked.append(path)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", counted)
    page.poll()
    assert any("ann" in each.parts for each in looked)
    assert [each for each in looked if "gone" in str(each)] == []
    registry.move("ann", "paused", "why")
    add_again(registry, "gone1")
    page.poll()
    assert {(each.name, each.state) for each in page.tenants.values()} == {
        ("ann", "paused"), ("gone0", "removed"), ("gone1", "queued"), ("gone2", "removed"),
        ("gone3", "removed"),
    }  # fmt: skip
    metrics_of = registry.root / "runs/gone2/metrics.jsonl"
    metrics_of.parent.mkdir(parents=True)
    add_line(metrics_of, {"step": 6})
    page._due = 0.0  # it is time
    page.poll()
    shown = {row["name"]: row["steps"] for row in page.parts()["tenants"]["rows"]}
    assert shown["gone2"].startswith("7 of ")


def add_again(registry: Registry, name: str) -> None:
    registry.add(name, tenant(registry.root / "runs" / f"{name}-again"))
