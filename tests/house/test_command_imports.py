"""A command imports only what it needs: help and bad input do not wait for torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli import main

HEAVY = ("torch", "megatron", "sglang", "transformers", "numpy", "pyarrow", "starlette")
"""Packages whose import takes a noticeable time."""
NOT_FOR_HELP = (*HEAVY, "pydantic", "yaml", "rich", "jinja2", "http.client")

PROGRAM = """
import json, sys
from mrl.cli import main

for words, unwanted in json.loads(sys.argv[1]):
    code = 0
    try:
        main(words)
    except SystemExit as end:
        code = end.code
    found = [name for name in unwanted if name in sys.modules]
    print(json.dumps([words, code, found]), file=sys.stderr)
"""


def test_help_and_bad_input_import_little(tmp_path: Path) -> None:
    run, nowhere = tmp_path / "run", str(tmp_path / "nowhere")
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    (run / "config.yaml").write_text(
        "{model: {path: m}, data: {path: d}, reward: repeat, train: {num_steps: 1}, output_dir: o,"
        " rollout: {prompts_per_step: 1, samples_per_prompt: 1, max_response_len: 1}}\n"
    )
    # In this order each command imports at least what those before it do.
    wanted = [
        *(([*words, "--help"], 0, NOT_FOR_HELP) for words in ([], ["train"], ["engines", "add"])),
        *((words, 2, NOT_FOR_HELP) for words in (["no-such-command"], ["check"], ["why", "run"])),
        (["recipe"], 0, HEAVY),
        *(([name, nowhere], 2, HEAVY) for name in ("train", "check", "eval", "serve")),
        *(([name, nowhere, "0"], 2, HEAVY) for name in ("why", "replay", "branch", "export")),
        (["engines", "list", nowhere], 2, HEAVY),
        (["tenants", "list", "--service", nowhere], 2, HEAVY),
        (["reward", "test", "exact_match", nowhere], 2, HEAVY),
        (["view", nowhere], 2, HEAVY),
        (["view", str(run)], 0, HEAVY),
        (["diff", str(run), str(run)], 0, HEAVY),
    ]
    asked = json.dumps([(words, unwanted) for words, _, unwanted in wanted])
    command = [sys.executable, "-c", PROGRAM, asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    reports = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    assert reports == [[words, code, []] for words, code, _ in wanted], done.stderr


def test_ctrl_c_before_a_command_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mrl.cli._parse", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["view", "run"])
    assert end.value.code == 130
    assert capsys.readouterr().err == ""
