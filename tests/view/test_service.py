"""The page of a service, made of a folder that the service's own code wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.run.json_lines import add_line
from mrl.service.control import Control
from mrl.service.registry import Registry
from mrl.view.service import NOTHING, collect_service
from tests.tenants.parts import make_model, service, tenant
from tests.view.browser import Page, open_browser
from tests.view.invented import HOSTILE

NAMES = ("ann", "bob", "cec", "dan")


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("tenants_model", make_model)


@pytest.fixture
def registry(tmp_path: Path, model: Path) -> Iterator[Registry]:
    with Registry(service(tmp_path, model)) as made:
        yield made


def add(registry: Registry, *names: str) -> None:
    for name in names:
        registry.add(name, tenant(registry.root / "runs" / name))


def round_of(number: int, *names: str) -> dict[str, Any]:
    """The metrics of a round in which each tenant has one more part than the one before it."""
    whole = sum(range(1, len(names) + 1))
    row: dict[str, Any] = {
        "round": number, "service/phase_tenants": len(names), "time/sync_s": 1.0, "time/rollout_s": 6.0,
        "time/train_s": 2.0, "time/round_s": 9.5, "time/timestamp": 1.8e9 + number,
        "service/engine_occupancy": 0.4, "service/running_requests": 3.25, "service/kv_occupancy": 0.25,
        "service/kv_counted": 0.5, "service/batch_tenants": 1.5, "service/queue_age_s": 4.0,
    }  # fmt: skip
    for part, name in enumerate(names, 1):
        found = {
            "batch_share": part / whole, "tokens": 1000 * part, "gate_wait_s": 0.5 * part,
            "queue_age_s": 2.0 * part, "swap_s": 0.0, "swap_bytes": 500, "update_s": part,
            "trainer_share": part / whole,
        }  # fmt: skip
        row |= {f"service/{name}/{key}": value for key, value in found.items()}
    return row


def fill(registry: Registry) -> Path:
    """Four tenants after three rounds: cec is paused, dan was removed and has no run folder any more.
    The service was started again after two rounds, and killed while it wrote of a fourth."""
    add(registry, *NAMES)
    for name in ("ann", "bob", "cec"):
        registry.move(name, "running")
        run = registry.root / "runs" / name
        run.mkdir(parents=True)
        add_line(run / "metrics.jsonl", {"step": 1, "reward/mean": 0.25, "response_len/mean": 30.5})
    registry.move("cec", "paused", f"RuntimeError: {HOSTILE[0]}")
    registry.move("dan", "removed")
    (registry.root / "runs/bob/view.html").write_text("a page")
    metrics = registry.root / "metrics.jsonl"
    for number in (0, 1, 0):
        add_line(metrics, round_of(number, "ann", "bob", "dan"))
    with metrics.open("a") as file:
        file.write(json.dumps(round_of(1, "ann"))[:80])
    return registry.root


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_browser() as page:
        yield page


def shown(page: Page, folder: Path) -> str:
    """Make the page and return its text, once it was shown without a complaint."""
    main(["view", str(folder)])
    page.view(1440, 900)
    page.open(folder / "view.html")
    page.settle()
    text = page.text("body")
    page.assert_quiet(folder / "view.html")
    return text


def test_a_service_with_all_that_can_be_missing(registry: Registry, page: Page) -> None:
    folder = fill(registry)
    text = shown(page, folder)
    assert "3 rounds, the last at 2027" in text
    assert "no service ran in it here" in text
    assert "could not be read: 1" in text
    assert page.count("img") == 0
    assert HOSTILE[0] in text
    cells = "[...row.cells].map((cell) => cell.innerText)"
    rows = page.evaluate(
        f"[...document.querySelectorAll('.tenants tbody tr')].map((row) => {cells})"
    )
    assert rows[1] == [
        "bob", "running", "2 of 3", "1", "0.25", "30.5", NOTHING, NOTHING, "33%", "6,000", "33%", "1",
        "4", "runs/bob",
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["ann", "bob", "cec", "", "dan"]
    assert (rows[4][2], rows[4][-1]) == (f"{NOTHING} of 3", "runs/dan (not there)")
    links = "[...document.querySelectorAll('.tenants a')].map((a) => a.getAttribute('href'))"
    assert page.evaluate(links) == ["runs/ann/", "runs/bob/view.html", "runs/cec/"]
    keys = " ".join(f"service/{name}/batch_share" for name in ("ann", "bob", "dan"))
    mix = f"#curves [data-keys='{keys}']"
    assert page.count(f"{mix} path.area") == 3
    labels = f'[...document.querySelectorAll("{mix} .key")].map((k) => k.textContent)'
    assert page.evaluate(labels) == ["ann", "bob", "dan"]
    assert page.count("#curves figure.chart") == 12
    axes = "[...new Set([...document.querySelectorAll('#curves .axis')].map((a) => a.textContent))]"
    assert set(page.evaluate(axes)) == {"round", "share", "requests", "tenants", "tokens", "s"}


def test_rounds_of_a_service_that_was_started_again_are_numbered_on(registry: Registry) -> None:
    for number in (0.0, 1.0, 0, 3, 3, None, "x", 1e300):
        add_line(registry.root / "metrics.jsonl", {"round": number, "time/round_s": 1.0})
    data = collect_service(registry.root, registry.root / "view.html")
    assert data["metrics"]["steps"] == [0, 1, 2, 5, 6, 7, 8, 9]


def test_a_service_that_never_had_a_tenant_or_a_round(registry: Registry, page: Page) -> None:
    text = shown(page, registry.root)
    assert "no round" in text
    assert "The service has no tenant yet" in text
    add(registry, "ann")
    with Control(registry):
        text = shown(page, registry.root)
    assert "it ran when this page was made" in text
    assert "queued" in text
    assert "runs/ann (not there yet)" in text


def test_a_name_that_another_tenant_has_since(registry: Registry) -> None:
    add(registry, "ann")
    registry.move("ann", "removed")
    registry.add("ann", tenant(registry.root / "runs/other"))
    for number, sequence in ((0, 1), (1, 2), (2, 2)):
        row = {**round_of(number, "ann"), "service/ann/sequence": float(sequence)}
        add_line(registry.root / "metrics.jsonl", row)
    data = collect_service(registry.root, registry.root / "view.html")
    assert [(each["state"], each["numbers"][5]) for each in data["tenants"]] == [
        ("queued", "2,000"),
        ("removed", NOTHING),
    ]


@pytest.mark.parametrize("option", ["--steps", "--max-samples"])
def test_options_of_samples_are_refused(
    registry: Registry, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["view", str(registry.root), option, "3"])
    assert stopped.value.code == 2
    assert f"{option} selects samples" in capsys.readouterr().err


def test_a_folder_that_is_neither(
    tmp_path: Path, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(registry.root / "tenants")
    (registry.root / "metrics.jsonl").unlink(missing_ok=True)
    with pytest.raises(SystemExit):
        main(["view", str(registry.root)])
    assert "as a run has, nor service.yaml and tenants, as a service has" in capsys.readouterr().err
