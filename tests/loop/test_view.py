"""`mrl view` of a real run, in a real browser."""

import re

from mrl.cli import main
from mrl.diagnosis.tokens import load_tokens
from mrl.run.folder import RunFolder
from tests.view.browser import open_browser


def test_page_of_a_real_run(recorded, tmp_path, capsys):
    file = tmp_path / "view.html"
    main(["view", str(recorded), "--output", str(file)])
    assert f"wrote {file}" in capsys.readouterr().out
    with open_browser() as page:
        page.view(1440, 900)
        page.open(file)
        assert "finished: 4 of 4 steps" in page.text("header")
        assert page.count("#curves .chart") >= 8
        assert page.count("#mismatch canvas[role=img]") == 2
        assert page.count("#decomposition tbody tr") >= 3
        last = RunFolder(recorded).read_metrics()[-1]
        shown = page.text('#curves [data-keys="grad_norm"] .value')
        assert float(shown) == float(f"{last['grad_norm']:.4g}")
        assert page.evaluate("document.querySelectorAll('#samples option')[3].textContent") == "3"
        _check_sample(page, recorded, step=3)
        page.click("[aria-label='Previous step']")
        assert "samples of step 2" in page.text("#about-step")
        page.assert_quiet(file)


def _check_sample(page, run, step):
    """The first sample in the list, and one of its tokens, against the files of the run."""
    number = int(page.text(".sample-list tbody button"))
    row = RunFolder(run).read_rollouts(step)[number]
    record = load_tokens(run / f"tokens/step_{step:06d}.safetensors")
    span = record.sample(record.sample_ids.tolist().index(number))
    texts = page.evaluate("[...document.querySelectorAll('.token')].map((t) => t.textContent)")
    assert len(texts) == span.stop - span.start
    assert "".join(texts[: row["prompt_len"]]) == row["prompt"]
    assert float(page.text(".sample-list tbody td:nth-of-type(2)")) == float(f"{row['reward']:.4g}")
    token = row["prompt_len"] + 1
    page.hover(".token", nth=token)
    panel = page.text(".token-panel")
    logprob = float(record.rollout_logprobs[span][token])
    assert float(re.search(r"rollout log-prob\s+(\S+)", panel)[1]) == float(f"{logprob:.4g}")
    assert re.search(rf"weight version\s+{step}\b", panel)
    experts = record.expert_ids[span][token, 0].tolist()
    assert page.text("table.routes tbody td") == " ".join(map(str, experts))
