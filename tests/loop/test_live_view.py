"""`mrl view --follow` of a real run, in a real browser: before it begins, while it runs, after it was
killed, and after it began again."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mrl.view.live.server import LiveServer
from tests.loop.conftest import Toy, environment
from tests.loop.forked import Command
from tests.view.browser import Page, open_browser

LIMIT_S = 240.0
PHASES = {"rollout", "training"}
WATCH = """
window.seen = {}; window.phases = new Set(); window.counts = new Set();
new MutationObserver(() => {
  const done = /^(\\d+) of/.exec(document.querySelector('#state').textContent);
  if (done) seen[done[1] - 1] ??= Date.now() / 1000;
  phases.add(document.querySelector('#phase strong').textContent);
  counts.add(document.querySelector('#phase-samples').textContent);
}).observe(document.body, { childList: true, characterData: true, subtree: true });
"""


@contextmanager
def arrivals(metrics: Path) -> Iterator[dict[int, float]]:
    """When the line of each step was first in the file, on the clock of this machine."""
    found: dict[int, float] = {}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.004):
            if metrics.exists():
                for line in metrics.read_bytes().split(b"\n")[:-1]:
                    found.setdefault(json.loads(line)["step"], time.time())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def until(page: Page, expression: str, command: Command | None = None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not page.evaluate(f"Boolean({expression})"):
        assert command is None or command.poll() in (None, 0), command.finish(10)
        assert time.monotonic() < deadline, page.text("body")[:2000]
        time.sleep(0.05)


def word(text: str) -> str:
    return f"document.querySelector('#word').textContent === {json.dumps(text)}"


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_page_is_at_most_a_second_behind(toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("checkpoint.save_every=2", "train.num_steps=6")
    with (
        LiveServer([run]) as server,
        open_browser() as page,
        arrivals(run / "metrics.jsonl") as came,
    ):
        page.view(1440, 900)
        page.go(server.url)
        assert page.evaluate(word("waiting"))
        page.evaluate(WATCH)
        command = toy.start(run, *more, env=environment())
        until(page, word("finished"), command)
        assert command.finish(LIMIT_S).returncode == 0
        seen = page.evaluate("seen")
        lags = [seen[str(step)] - came[step] for step in range(6) if str(step) in seen]
        half, most = statistics.median(lags), max(lags)
        print(f"seconds behind, {len(lags)} steps: {half:.2f}, at most {most:.2f}")
        assert statistics.median(lags) < 1.0
        assert set(page.evaluate("[...phases]")) >= PHASES
        assert any("of 16 samples" in text for text in page.evaluate("[...counts]"))
        until(page, "document.querySelectorAll('#reward-curve .dot').length === 6")

        command = toy.start(run, *more[:1], "train.num_steps=400", env=environment())
        steps = "/^(\\d+) of 400/.exec(document.querySelector('#state').textContent)?.[1]"
        until(page, f"Number({steps}) > 6")
        started = psutil.Process(command.pid)
        for process in [started, *started.children(recursive=True)]:
            process.kill()
        until(page, word("gone"))
        done = page.evaluate("parseInt(document.querySelector('#state').textContent)")
        saved = int((run / "checkpoints/latest_checkpointed_iteration.txt").read_text())
        command = toy.start(run, *more[:1], f"train.num_steps={saved + 1}", env=environment())
        until(page, word("finished"), command)
        until(page, f"document.querySelectorAll('#reward-curve .dot').length === {saved + 1}")
        assert saved <= done
        command.finish(LIMIT_S)
        assert page.errors == []
