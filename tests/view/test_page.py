"""The page in a real browser. What every page must: no complaint, and no request but for itself."""

import json
import random
import re

import pytest

from mrl.cli import main
from mrl.diagnosis.tokens import save_tokens
from mrl.view.render import json_block
from tests.release import release
from tests.view.browser import open_browser
from tests.view.invented import HOSTILE, record, write_run


@pytest.fixture(scope="module")
def page():
    with open_browser() as page:
        yield page


@pytest.fixture(scope="module")
def invented(tmp_path_factory):
    """The page of a run full of texts that would like to be markup."""
    run = write_run(tmp_path_factory.mktemp("invented") / "run")
    main(["view", str(run)])
    return run / "view.html"


@pytest.fixture
def opened(page, invented):
    page.view(1440, 900)
    page.open(invented)
    yield page
    page.assert_quiet(invented)


def test_hostile_texts_stay_texts(opened):
    assert opened.evaluate("document.title").endswith("mrl view")
    assert opened.count("img") == 0
    assert opened.count("script") == 2
    opened.click("#all summary", 0)
    shown = opened.text("body")
    assert HOSTILE[0] in shown
    assert HOSTILE[1] in shown
    assert HOSTILE[2] in shown
    assert "49" not in opened.text(".tokens")
    # Half characters and characters that turn the text around are shown by number.
    assert "\u27e8202E\u27e9drawkcab\u27e87\u27e9\u27e8D800\u27e9" in opened.text(".tokens")


def test_policy_lets_nothing_else_run(opened):
    opened.evaluate(
        "(() => { const s = document.createElement('script'); try { s.text = 'window.ran = 1' }"
        " catch { window.refused = 1 } document.body.append(s) })()"
    )
    assert opened.evaluate("window.refused") == 1
    assert opened.evaluate("window.ran") is None
    answer = "fetch('data:text/plain,x').then(() => 'sent', () => 'refused')"
    assert opened.evaluate(answer) == "refused"
    assert opened.errors
    opened.errors.clear()


def test_curves_read_out_the_step_under_the_pointer(opened):
    reward = '#curves [data-keys="reward/mean"]'
    assert "0.8701" in opened.text(f"{reward} .value")
    opened.hover(f"{reward} svg")
    assert opened.text(f"{reward} .chart-step") == "step 2"
    assert "0.5828" in opened.text(f"{reward} .value")
    grad = '#curves [data-keys="grad_norm"]'
    assert opened.text(f"{grad} .value") == "not finite"  # all charts point at one step
    assert opened.count(f"{grad} .not-finite") == 1
    assert (
        opened.evaluate(f"document.querySelector('{grad} .line').getAttribute('d')").count("M") == 2
    )
    opened.evaluate(f"document.querySelector('{reward}').focus()")
    opened.press("ArrowRight")
    assert opened.text(f"{reward} .chart-step") == "step 3"


def test_log_scale_and_search(opened):
    opened.click('#curves [data-keys="reward/mean"] button')
    assert "1 value(s) of 0 or less" in opened.text('#curves [data-keys="reward/mean"]')
    opened.click("#search")
    opened.type("LAYER_02 entropy")
    assert opened.text("#found .chart-title") == "moe/load_entropy/layer_02"
    assert opened.count("#found .chart") == 1
    assert opened.count("#found svg path.line") == 1
    opened.evaluate("document.querySelector('#search').value = ''")
    opened.click("#search")
    opened.type("__proto__")
    assert opened.count("#found .chart") == 1


def test_mismatch_dashboard(opened):
    opened.evaluate("document.querySelector('.heatmap canvas').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        opened.press(key)
    assert opened.text(".heatmap .readout") == "layer 2, step 2: 0.04"
    opened.choose("#mismatch select", "moe/load_entropy")
    assert opened.text(".heatmap .chart-title") == "moe/load_entropy"
    table = opened.text("#decomposition")
    assert re.search(r"replay of expert ids\s+0.004\s+4e-4", table)
    assert re.search(r"replay of ids, quantised weights\s+0.0015\s+1.5e-4", table)
    assert re.search(r"measure\s+total\s+routes\s+quantization\s+rest", table)
    assert re.search(r"logprob_abs_mean\s+0.02\s+0.016\s+0.0025\s+0.0015", table)
    assert "engine's quantised weights remove" in table
    assert "diverge first in layer 2" in table
    assert "stale weights" in opened.text("#findings")
    axes = "[...document.querySelectorAll('#curves .axis')].map((a) => a.textContent)"
    assert {"step", "reward", "norm"} <= set(opened.evaluate(axes))


@pytest.mark.parametrize("width", [1440, 390])
def test_every_chart_names_both_axes(page, invented, width):
    """Also those of single keys, and of keys that are not mrl's."""
    page.view(width, 900)
    page.open(invented)
    page.evaluate("document.querySelectorAll('#all details').forEach((d) => { d.open = true })")
    charts = (
        "[...document.querySelectorAll('figure.chart')].map((c) => [c.dataset.keys,"
        " ...[...c.querySelectorAll('.axis')].map((a) => a.textContent)])"
    )
    found = page.evaluate(
        f"new Promise((done) => requestAnimationFrame(() => setTimeout(() => done({charts}))))"
    )
    assert len(found) > 25
    assert [chart for chart in found if chart[1:2] != ["step"] or not chart[2]] == []
    assert ["time/rollout_s time/train_s", "step", "s"] in found
    assert ["__proto__", "step", "value"] in found
    left = "[...document.querySelectorAll('#curves .axis')].map((a) => a.getBoundingClientRect())"
    outside = f"{left}.filter((b) => b.left < 0 || b.right > {width}).length"
    assert page.evaluate(outside) == 0
    page.assert_quiet(invented)


def test_samples_are_sorted_picked_and_read(opened):
    ids = "[...document.querySelectorAll('.sample-list tbody button')].map((b) => b.textContent)"
    assert opened.evaluate(ids) == ["1", "3", "2", "0"]
    assert "\u2192" in opened.text(".sample-list tbody td")
    opened.choose("#samples select", "low", nth=1)
    assert opened.evaluate(ids) == ["0", "1", "2", "3"]
    opened.click(".sample-list tbody button", nth=1)
    assert opened.count(".token") == 24
    assert opened.evaluate("document.querySelectorAll('.token.extreme')[0].dataset.token") == "10"
    opened.hover(".token", nth=10)
    panel = opened.text(".token-panel")
    assert re.search(r"difference Δ\s+1.5\b", panel)
    assert re.search(r"ratio exp\(Δ\)\s+4.482", panel)
    assert re.search(r"advantage\s+0.5\b", panel)
    assert re.search(r"weight version\s+4\b", panel)
    opened.click(".token.rerouted")
    assert opened.text("tr.differs").split() == ["2", "≠", "0", "7", "6", "7", "0.25"]
    assert opened.count("table.routes tbody tr") == 3
    opened.hover(".token", nth=12)  # a click holds the token
    assert re.search(r"position\s+8 of 24", opened.text(".token-panel"))
    opened.choose("#samples select", "routes", nth=2)
    painted = "[...document.querySelectorAll('.token')].filter((t) => t.style.backgroundColor)"
    assert opened.evaluate(f"{painted}.map((t) => t.dataset.token)") == ["8"]
    opened.click("[aria-label='Previous step']")
    assert "samples of step 3" in opened.text("#about-step")


def test_keys_move_through_the_tokens(opened):
    opened.evaluate("document.querySelector('.tokens').focus()")
    opened.press("ArrowRight")
    assert "position\n6 of 24" in opened.text(".token-panel")
    opened.press("End")
    assert "No route was captured" in opened.text(".token-panel")


@pytest.mark.parametrize(
    ("width", "height", "dark"),
    [(1440, 900, False), (390, 844, True), release(1440, 900, True), release(390, 844, False)],
)
def test_nothing_is_wider_than_the_window(page, invented, width, height, dark):
    page.view(width, height, dark)
    page.open(invented)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    page.assert_quiet(invented)


@pytest.mark.parametrize("num_steps", [0, 1, 5000])
def test_any_length_of_run(page, tmp_path, num_steps):
    margin = "routing/margin_at_disagreement"
    fixed = {"routing/disagreement/layer_01": 0.5, "time/train_s": 1.0, "mismatch/p50": 0.0}
    rows = [
        {"step": i, "reward/mean": None if i % 3 else i / 7, **fixed, margin: None}
        for i in range(num_steps)
    ]
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["view", str(tmp_path)])
    page.view(1440, 900)
    page.open(tmp_path / "view.html")
    assert page.count("#curves .chart") == (2 if num_steps else 0)
    if num_steps:
        assert "No finite value at any step" in page.text(f'[data-keys="{margin}"]')
    assert ("No step is done" in page.text("#curves")) == (num_steps == 0)
    page.assert_quiet(tmp_path / "view.html")
    assert (tmp_path / "view.html").stat().st_size < 300_000


def show(page, run, rows):
    """Open the page of a run with these rows; returns its file."""
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["view", str(run)])
    page.view(1440, 900)
    page.open(run / "view.html")
    return run / "view.html"


@pytest.mark.parametrize("num_parts", [4, 9])
def test_the_stack_is_the_sum_of_all_parts_at_every_step(page, tmp_path, num_parts):
    """Parts are noisy, their sum is 10 at each of 5,000 steps: the top of the stack is level."""
    draw = random.Random(num_parts).random
    rows = []
    for step in range(5000):
        parts = [draw() * 10 / (i + 1) / num_parts for i in range(num_parts - 1)]
        parts.append(10.0 - sum(parts))
        rows.append({"step": step} | {f"time/part{i}_s": part for i, part in enumerate(parts)})
    file = show(page, tmp_path, rows)
    chart = "#curves [data-keys*='time/part0_s']"
    assert page.count(chart) == 1
    path = page.evaluate(f"document.querySelector(\"{chart} .area\").getAttribute('d')")
    points = path.strip("MZ").split("L")
    assert len(points) > 600
    assert len({point.split(",")[1] for point in points[: len(points) // 2]}) == 1
    assert page.count(f"{chart} .value") == min(num_parts, 8)
    if num_parts == 9:
        assert page.text(f"{chart} .legend li:last-child").startswith("2 others ")
        smallest = {"time/part6_s", "time/part7_s"}
        last = f'document.querySelector("{chart} .legend li:last-child .key")'
        assert set(page.evaluate(f"{last}.title").split()) == smallest
    page.assert_quiet(file)


def test_every_key_of_the_usual_curves_is_drawn(page, tmp_path):
    """Two evaluation sets, and more parts of the loss than a chart has colours."""
    names = ["avg@32", "avg@32_stderr", *(f"pass@{2**i}" for i in range(6)), "response_len"]
    keys = [f"eval/{name}/{key}" for name in ("aime", "own")
            for key in (*names, "truncated", "unscored")]  # fmt: skip
    keys += [f"loss/term_{i:02d}" for i in range(19)]
    keys += [f"memory/{phase}/kind{i}_bytes" for phase in ("rollout", "train") for i in range(5)]
    row = dict.fromkeys(keys, 0.5) | {"memory/train/kind0_bytes": 0}
    file = show(page, tmp_path, [{"step": step} | row for step in range(3)])
    charts = {
        title: drawn.split()
        for title, drawn in page.evaluate(
            "[...document.querySelectorAll('#curves .chart')]"
            ".map((c) => [c.querySelector('.chart-title').textContent, c.dataset.keys])"
        )
    }
    assert all(len(drawn) <= 8 for drawn in charts.values())
    shown = [key for drawn in charts.values() for key in drawn]
    assert sorted(shown) == sorted(set(keys) - {"memory/train/kind0_bytes"})
    assert charts["Evaluation: own"] == sorted(f"eval/own/{name}" for name in names[:-1])
    assert charts["Evaluation, response length"] == [
        "eval/aime/response_len",
        "eval/own/response_len",
    ]
    assert [len(charts[f"Loss ({i} of 3)"]) for i in (1, 2, 3)] == [8, 8, 3]
    assert len(charts["Memory: rollout"]) == 5
    assert "0 at every step: 1 of the keys" in page.text("#curves")
    page.assert_quiet(file)


def test_a_column_of_several_steps_opens_its_worst_step_with_samples(page, tmp_path):
    """Columns of 3 steps; samples of 31, 32 and 400; the worst of the column 30-32 has none."""
    (tmp_path / "tokens").mkdir()
    for step in (31, 32, 400):
        save_tokens(tmp_path / f"tokens/step_{step:06d}.safetensors", record(step, 1))
    values = {30: 0.9, 31: 0.4, 32: 0.6}
    layer = "routing/disagreement/layer_01"
    file = show(page, tmp_path, [{"step": i, layer: values.get(i, 0.1)} for i in range(500)])
    assert "samples of step 400" in page.text("#about-step")
    page.evaluate("document.querySelector('.heatmap canvas').focus()")
    for _ in range(11):
        page.press("ArrowRight")
    assert page.text(".heatmap .readout") == "layer 1, step 30: 0.9; samples of step 32"
    page.press("Enter")
    assert "samples of step 32" in page.text("#about-step")
    page.press("ArrowLeft")
    assert page.text(".heatmap .readout").endswith("; no samples in the page")
    page.press("Enter")
    assert "samples of step 32" in page.text("#about-step")
    page.assert_quiet(file)


def test_values_near_the_largest_float_are_clipped_and_said(page, tmp_path):
    """Differences of them were infinite, and NaN stood in the paths of the curves."""
    large = {0: 1e308, 1: -1e308, 2: 10**20, 3: 5e-324}
    keys = (
        "reward/mean",
        "reward/std",
        "time/rollout_s",
        "time/train_s",
        "loss/total",
        "routing/x",
    )
    layers = [f"routing/disagreement/layer_{layer:02d}" for layer in (1, 2)]
    rows = [{"step": i, **dict.fromkeys((*keys, *layers), v)} for i, v in large.items()]
    file = show(page, tmp_path, rows)
    page.click("#all summary", 0)
    for _ in ("linear", "log"):
        drawn = page.evaluate(
            "[...document.querySelectorAll('svg')].map((e) => e.outerHTML).join()"
        )
        assert "path" in drawn
        assert not {"NaN", "Infinity"} & set(re.split(r"[^A-Za-z]+", drawn))
        page.evaluate("document.querySelectorAll('.chart button').forEach((b) => b.click())")
    said = (
        "Values above 1e+100 are drawn as 1e+100: loss/total, reward/mean, reward/std and 5 more."
    )
    assert said in page.text("body")
    page.assert_quiet(file)


def test_json_block_cannot_be_left():
    block = json_block({"a": [*HOSTILE, "&lt;", "\u2028"]})
    assert not set(block) & set("<>&")
    assert block.isascii()
    assert json.loads(block)["a"][:3] == list(HOSTILE[:3])


def test_the_outcome_comes_first(opened):
    first = "document.querySelector('main section').id"
    assert opened.evaluate(first) == "outcome"
    assert "mean reward of the last 5 steps" in opened.text(".figures")
    assert opened.count('#reward-curve [data-keys="reward/mean"] path.line') == 1
    assert opened.count(".conversation.best") == 1
    assert HOSTILE[0] in opened.text(".conversation .answer")
