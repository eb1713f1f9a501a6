"""What environments, and the programs that call tools, refuse instead of taking it for something
else."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mrl.environments import StepResult
from mrl.environments.hosted.spec import PROGRAMS
from mrl.environments.openai_chat import Environment
from mrl.environments.worker import checked_result


def test_openai_chat_says_what_it_takes_for_new_messages(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        "class Odd:\n"
        "    def __init__(self, first=None, answer=None):\n"
        "        self.first, self.answer = first, answer\n"
        "    def reset(self, messages, seed):\n"
        "        return self.first\n"
        "    def __call__(self, messages):\n"
        "        return self.answer\n"
    )
    for first in ("text", {"role": "user", "content": "x"}):
        with pytest.raises(ValueError, match=r"reset\(\) returned .*, expected a list of messages"):
            Environment(f"{file}:Odd", first=first).reset("p", 0)
    for answer, match in (
        (("text", 0.0, False), "the target returned 'text' as new messages, expected a list"),
        (([], 1.0), r"the target returned \(\[\], 1.0\), expected \(new_messages, reward, done\)"),
        (None, r"the target returned None, expected \(new_messages, reward, done\)"),
    ):
        environment = Environment(f"{file}:Odd", answer=answer)
        assert environment.reset("p", 0) is None
        with pytest.raises(ValueError, match=match):
            asyncio.run(environment.step("x"))


def test_a_text_does_not_end_an_episode() -> None:
    with pytest.raises(ValueError, match="done is 'False', expected True or False"):
        checked_result(StepResult("x", 0.0, cast(Any, "False")))
    assert checked_result(StepResult("x", 0.0, cast(Any, np.True_)))["done"] is True


def test_an_mcp_server_is_sent_no_half_of_a_surrogate_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROGRAMS)
    program = runpy.run_path(str(PROGRAMS / "mcp_program.py"))
    call = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d%s"}}</tool_call>'
    assert program["_calls"]({"content": call % ""}, is_parsed=False) == (call % "", [])
    _, [(_, arguments, _)] = program["_calls"]({"content": call % "\\ude00"}, is_parsed=False)
    assert arguments == {"a": "\N{GRINNING FACE}"}
