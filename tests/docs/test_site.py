"""`make site`: every page is in it, and a browser finds its way on a wide and on a narrow window."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.view.browser import open_browser

MKDOCS = Path(sys.prefix) / "site/bin/mkdocs"
WINDOWS = {"wide": (1400, 1000), "narrow": (400, 800)}


def test_every_page_is_in_the_navigation():
    named = re.findall(r"(\w[\w-]*\.md)(?= |$)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(named) == set(), "add these to nav in mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built in strict mode: dead links, unknown anchors and missing pages end it."""
    if not MKDOCS.exists():
        assert not os.environ.get("CI"), "no mkdocs: make test-all installs it"
        pytest.skip("no mkdocs: make site installs it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.release
@pytest.mark.parametrize("window", WINDOWS)
def test_pages_fit_the_window_and_fetch_nothing(site, window):
    width, height = WINDOWS[window]
    with open_browser() as page:
        page.view(width, height)
        for file in sorted(set(site.glob("*.html")) - {site / "404.html"}):  # for servers only
            page.open(file)
            assert page.evaluate("document.documentElement.scrollWidth") == width, file.name
            assert page.errors == [], file.name
            fetched = [url for url in page.requests if not url.startswith(("file:", "data:"))]
            assert fetched == [], file.name
        page.open(site / "index.html")
        assert page.evaluate("document.title") == "mrl"
        assert page.text("h1").startswith("mrl")
        page.open(site / "metrics.html")
        assert page.count(".md-typeset table tr") > 100


@pytest.mark.release
@pytest.mark.parametrize("window", WINDOWS)
def test_the_search_finds_a_key_of_the_recipe(site, window):
    with open_browser() as page:
        page.view(*WINDOWS[window])
        page.open(site / "index.html")
        is_wide = window == "wide"
        page.click("input.md-search__input" if is_wide else "label.md-header__button[for=__search]")
        page.evaluate("document.querySelector('input.md-search__input').focus()")
        page.type("expert_bias_update_rate")
        page.press("End")  # the page listens for keys
        deadline = time.monotonic() + 30
        while not page.count(".md-search-result__item") and time.monotonic() < deadline:
            page.settle()
        links = page.evaluate(
            "[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"
        )
        assert any("/recipes.html" in link for link in links), links


@pytest.mark.release
def test_lists_are_those_of_github(site):
    """docs/gpu.md has a list whose third item holds a code block: it is one list of five items."""
    with open_browser() as page:
        page.open(site / "gpu.html")
        assert page.count("article ol:first-of-type > li") == 5
        assert page.count("article ol > li .highlight") == 1
