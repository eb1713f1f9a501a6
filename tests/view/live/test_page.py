"""The live page, in a real browser, on run folders that the tests write."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.run.failure import Failure, write_failure
from mrl.run.json_lines import add_line
from mrl.run.phase_file import FILE as PHASE
from mrl.view.live.server import LiveServer
from tests.view.browser import Page, open_browser
from tests.view.invented import HOSTILE, metrics, rollout, write_run

LIMIT_S = 20.0
"""For what happens at once, on a machine that has much else to do."""
DIALOGUE = (
    "I look.\n<tool_call>\n"
    '{"name": "search", "arguments": {"query": "<b>x</b>"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n" + HOSTILE[0]
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_browser() as page:
        page.view(1440, 900)
        yield page


def wait(page: Page, expression: str) -> None:
    """Wait until an expression of the page is true."""
    deadline = time.monotonic() + LIMIT_S
    while not page.evaluate(f"Boolean({expression})"):
        assert time.monotonic() < deadline, f"{expression}\n{page.text('body')[:2000]}"
        time.sleep(0.03)


def says(page: Page, selector: str, text: str) -> None:
    query = (
        f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})"
    )
    wait(page, query)


def write_phase(run: Path, phase: str, step: int, **more: Any) -> None:
    now = time.time()
    spans = [["sync", now - 5, now - 3], [phase, now - 3, None]]
    row = {"phase": phase, "step": step, "tenant": "", "since": now - 3, "time": now, "finished": 0,
           "wanted": 0, "spans": spans, "host": "another", "pid": 1, "began": "1"}  # fmt: skip
    (run / "new").write_text(json.dumps(row | more))
    (run / "new").rename(run / PHASE)


def write_samples(run: Path, step: int) -> None:
    samples = [
        rollout(i) | {"completion": DIALOGUE if i == 0 else f"answer {step}"} for i in range(4)
    ]
    (run / "rollouts").mkdir(exist_ok=True)
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (run / f"rollouts/step_{step:06d}.jsonl").write_text(text)


def test_a_run_appears_as_it_is_written(page: Page, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with LiveServer([run]) as server:
        page.go(server.url)
        says(page, "#state-note", "the run has not begun")
        run.mkdir()
        (run / "config.yaml").write_text("train:\n  num_steps: 6\n")
        write_phase(run, "rollout", 0, finished=5, wanted=8)
        says(page, "#phase", "5 of 8 samples finished")
        assert "rollout step 0" in " ".join(page.text("#phase").split())
        page.evaluate(
            "window.seen = []; new MutationObserver(() => { const n = document.querySelectorAll("
            "'#reward-curve .dot').length; if (n > seen.length) seen.push(Date.now() / 1000); })"
            ".observe(document.querySelector('#reward-curve'), { childList: true, subtree: true })"
        )
        lags = []
        for step in range(5):
            begin = time.time()
            add_line(run / "metrics.jsonl", metrics(step))
            wait(page, f"seen.length > {step}")
            lags.append(page.evaluate(f"seen[{step}]") - begin)
            time.sleep(0.07 * step)
        assert statistics.median(lags) < 1.0, lags
        says(page, "#state", "5 of 6 steps")
        assert "mean reward of the last 5 steps" in page.text("#figures")
        write_phase(run, "train", 5)
        says(page, "#phase", "training")
        write_phase(run, "ended", 5)
        says(page, "#word", "ended")
        wait(page, "document.querySelector('#phase').hidden")
        add_line(run / "metrics.jsonl", metrics(5))
        says(page, "#word", "finished")
        write_failure(run, Failure(HOSTILE[0], 1, command="mrl train again", log_tail=["the end"]))
        says(page, "#failure", HOSTILE[0])
        shutil.rmtree(run)
        says(page, "#state-note", "is gone")
        assert page.count("#reward-curve .dot") == 6
        assert page.errors == []
        server.close()
        says(page, "#link-state", "ended")


def test_nothing_jumps_while_somebody_reads(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE[6].replace("/", "_"), num_steps=3)
    write_samples(run, 2)
    with LiveServer([run]) as server:
        page.go(server.url)
        says(page, "#about-step", "4 samples of step 2")
        says(page, "#best-and-worst", "Best and worst samples of step 2")
        page.click(".sample-list tbody button")
        says(page, ".dialogue", "calls search")
        assert page.text(".dialogue .tool-call pre") == '{\n  "query": "<b>x</b>"\n}'
        assert page.text(".dialogue .tool-result pre") == "42"
        assert HOSTILE[0] in page.text(".dialogue .said:last-child")
        top = "node.getBoundingClientRect().top"
        before = page.evaluate(f"window.node = document.querySelector('.dialogue'); {top}")
        write_samples(run, 3)
        says(page, "#samples", "Samples of step 3 are there.")
        for step in range(3, 6):
            add_line(run / "metrics.jsonl", metrics(step) | {f"new/{step}": 1.0})
        says(page, "#state", "6 of 3 steps")
        assert page.evaluate("node === document.querySelector('.dialogue') && node.isConnected")
        assert abs(page.evaluate(top) - before) < 2
        assert "step 2" in page.text("#best-and-worst")
        page.click("#samples .announced button")
        says(page, "#about-step", "4 samples of step 3")
        page.click("#follow")
        write_samples(run, 6)
        says(page, "#about-step", "samples of step 6")
        says(page, "#best-and-worst", "samples of step 6")
        page.click(".sample-list tbody button")
        wait(page, "document.querySelectorAll('.dialogue button').length > 0")
        page.click(".dialogue button")
        says(page, ".dialogue", "<|im_end|>")
        assert page.count("#curves .chart") >= 4
        assert page.count("img") == 0
        assert page.evaluate("document.title").endswith("mrl view")
        page.evaluate(
            "(() => { const s = document.createElement('script'); try { s.text = 'window.ran = 1' }"
            " catch { window.refused = 1 } })()"
        )
        assert page.evaluate("window.refused === 1 && window.ran === undefined")
        page.errors.clear()
        page.evaluate("document.querySelectorAll('#all details').forEach((d) => { d.open = true })")
        wait(page, "document.querySelectorAll('#all .chart svg').length > 20")
        assert page.errors == []
        assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in page.requests)


def test_a_browser_that_slept_and_a_run_that_began_again(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=5)
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    with LiveServer([run]) as server:
        page.go(server.url)
        says(page, "#link-state", "live")
        page.send("Network.emulateNetworkConditions", offline=True, **offline)
        server.pages.main.feed.publish("notes", [])  # it cannot come
        for step in range(5, 8):
            add_line(run / "metrics.jsonl", {"step": -step})
            add_line(run / "metrics.jsonl", metrics(step))
        time.sleep(0.3)
        page.send("Network.emulateNetworkConditions", offline=False, **offline)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        says(page, "#state", "8 of 5 steps")
        wait(page, "document.querySelectorAll('#reward-curve .dot').length === 8")
        rows = [json.dumps(metrics(step)) + "\n" for step in range(2)]
        (run / "new").write_text("".join(rows))
        (run / "new").rename(run / "metrics.jsonl")
        wait(page, "document.querySelectorAll('#reward-curve .dot').length === 2")
        says(page, "#state", "2 of 5 steps")
        add_line(run / "metrics.jsonl", metrics(2))
        wait(page, "document.querySelectorAll('#reward-curve .dot').length === 3")


def test_runs_are_compared(page: Page, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, num_steps=3) for name in ("a", "b")]
    with LiveServer([*runs, tmp_path / "later"]) as server:
        page.go(server.url)
        says(page, "#outcomes", "mean reward of the last 3 steps")
        reward = '#curves [data-keys^="reward/mean#0"]'
        assert page.count(f"{reward} path.line") == 2
        add_line(runs[1] / "metrics.jsonl", {"step": 99, "rew": 1})
        add_line(runs[1] / "metrics.jsonl", metrics(100))
        (tmp_path / "later").mkdir()
        add_line(tmp_path / "later/metrics.jsonl", metrics(1))
        wait(page, f"document.querySelectorAll('{reward} path.line').length === 3")
        says(page, "#outcomes", "later (unknown, 2 steps)")
        assert page.errors == []


@pytest.mark.release  # view/test_page.py measures the same page
@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
def test_the_page_fits_the_window(page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    run = write_run(tmp_path / "run", num_steps=3)
    write_phase(run, "rollout", 3, finished=5, wanted=8)
    with LiveServer([run]) as server:
        page.view(width, 900, dark=dark)
        page.go(server.url)
        says(page, "#best-and-worst", "Best and worst")
        page.click(".sample-list tbody button")
        says(page, ".dialogue", "Sample")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []
    page.view(1440, 900)
