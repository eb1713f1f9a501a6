"""The page that compares runs, in a real browser."""

import json

import pytest

from mrl.cli import main
from mrl.view.compare import collect_comparison
from mrl.view.render import COMPARISON, render
from tests.view.browser import open_browser
from tests.view.invented import write_run


@pytest.fixture(scope="module")
def page():
    with open_browser() as page:
        yield page


def test_runs_side_by_side(page, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    runs = [write_run(folder / name, num_steps=steps) for name, steps in (("a", 5), ("b", 3))]
    main(["view", *map(str, runs)])
    file = runs[0] / "compare.html"
    for width in (1440, 400):
        page.view(width, 900)
        page.open(file)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.count('#curves [data-keys="reward/mean#0 reward/mean#1"] path.line') == 2
        assert "train.num_steps" in page.text("#recipes")
    page.assert_quiet(file)


def test_a_run_has_one_colour_and_its_name_in_all_charts(page, tmp_path):
    """The first run has no entropy and a text as reward; the second no finite `kl/ref`."""
    for name, row in (
        ("a", {"reward/mean": "high", "grad_norm": 1e200}),
        ("b", {"reward/mean": 0.5, "grad_norm": 1.0, "entropy": 0.25, "kl/ref": None}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 0} | row) + "\n")
    file = tmp_path / "page.html"
    data = collect_comparison([tmp_path / "a", tmp_path / "b"])
    file.write_text(render(data, COMPARISON))
    page.view(1440, 900)
    page.open(file)
    for key in ("reward/mean", "entropy"):
        chart = f'#curves [data-keys="{key}#1"]'
        assert page.text(f"{chart} .legend li").split() == [
            "b",
            {"entropy": "0.25"}.get(key, "0.5"),
        ]
        assert page.count(f"{chart} .swatch.c1") == page.count(f"{chart} .line.c1") == 1
        assert page.count(f"{chart} .dot.c1") == 1
    assert "No finite value at any step: b." in page.text('#curves [data-keys="kl/ref#1"]')
    label = "document.querySelector('[data-keys=\"entropy#1\"] svg').getAttribute('aria-label')"
    assert page.evaluate(label) == "entropy. b: 0.25 to 0.25, last 0.25"
    assert "Values above 1e+100 are drawn as 1e+100: grad_norm of a." in data["notes"]
    page.assert_quiet(file)
