"""Tools of real MCP servers, called by a policy that says what the tests want."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mrl.config import EnvironmentConfig
from mrl.environments.command import MARK
from mrl.environments.hosted.spec import listed_tools
from mrl.errors import InputError
from mrl.system.process_search import find_by_variable
from tests.hosted.talking import MCP, Stage, needs_mcp, stage, text_of
from tests.waiting import wait_until

pytestmark = [needs_mcp, pytest.mark.timeout(600)]
SERVER = Path(__file__).parent / "odd_server.py"
CALCULATOR = Path(__file__).parents[2] / "launch/recipes/agents/calculator_server.py"


@pytest.fixture(autouse=True)
def sdk(monkeypatch):
    """The SDK is in a folder of its own."""
    paths = [str(MCP), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def make_config(script: Path = SERVER, time_limit_s: float = 60, **mcp) -> EnvironmentConfig:
    command = {} if "url" in mcp else {"command": ["python", str(script)]}
    mcp = {**command, "show_tools": "never", **mcp}
    # A server gets few variables of its parent.
    if "command" in mcp:
        mcp["env"] = {"PYTHONPATH": str(MCP), **mcp.get("env", {})}
    return EnvironmentConfig(mcp=mcp, episode_limit_s=200, time_limit_s=time_limit_s)


def call_of(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script_of(found: Stage, *turns: str) -> None:
    """Let the policy say `turns`, one after the other, in each episode."""

    def say(request):
        text = found.engine.tokenizer.decode(request.token_ids.tolist())
        return turns[text.count("<|im_start|>assistant\n") - 1]

    found.engine.say = say


def results_of(record) -> list[str]:
    """Return what the tools answered in an episode."""
    parts = text_of(record).split("<|im_start|>tool\n")[1:]
    return [part.partition("<|im_end|>")[0] for part in parts]


def played(found: Stage, *turns: str, **settings):
    script_of(found, *turns)
    return found.play({"prompt": [{"role": "user", "content": "go"}]}, **settings)


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(MCP), os.environ.get("PYTHONPATH", "")]))
        with stage(make_config(per_episode=False, time_limit_s=30)) as found:
            yield found


def test_the_calculator(shared):
    with stage(make_config(CALCULATOR)) as found:
        outcome, record = played(found, call_of("calculate", a=3, op="*", b=4), "12, I think")
    assert (outcome.answer, outcome.error) == ("12, I think", "")
    assert text_of(record) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
        f"{call_of('calculate', a=3, op='*', b=4)}<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n"
        "<|im_start|>assistant\n12, I think<|im_end|>"
    )
    (sample,) = record.samples(3)
    assert len(sample.weight_versions) == 2


def test_several_calls_in_one_answer_and_in_several(shared):
    two = f"I add. {call_of('add', a=1, b=2)} and {call_of('add', a=3, b=4)}"
    outcome, record = played(shared, two, call_of("add", a=3, b=7), "10")
    assert results_of(record) == ["3", "7", "10"]
    assert outcome.answer == "10"


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (call_of("fails"), "on purpose"),
        (call_of("refuses"), "error: not today"),
        (call_of("add", a=1), "b\n  Field required"),
        (call_of("nobody"), "error: there is no tool 'nobody'; there are add, counts"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "error: the arguments"),
        (call_of("nothing"), "null"),
        (call_of("image"), "[image left out]"),
        (call_of("variable"), "None False"),
    ],
)
def test_what_the_policy_reads(shared, call, result):
    """Errors of tools are results, and the episode goes on."""
    outcome, record = played(shared, call, "well")
    assert outcome.answer == "well"
    assert result in results_of(record)[0]


def test_a_result_that_is_too_long_loses_its_middle(shared):
    outcome, record = played(shared, call_of("huge"), "well", context_len=20_000)
    (result,) = results_of(record)
    assert outcome.answer == "well"
    assert 7900 < len(result) <= 8000
    assert result.startswith("beginxxx")
    assert result.endswith("xxxend")
    assert "\n[2992068 characters left out]\n" in result


def test_text_that_is_no_call_is_the_answer(shared):
    for text in ("<tool_call>{</tool_call>", '<tool_call>["add"]</tool_call>', "<tool_call>"):
        outcome, record = played(shared, text)
        assert outcome.answer == text
        assert not results_of(record)


def test_a_server_that_dies_or_hangs_is_replaced(shared):
    outcome, _ = played(shared, call_of("dies"), "well")
    assert outcome.answer is None
    assert "the server is gone" in outcome.error
    assert results_of(played(shared, call_of("add", a=1, b=1), "well")[1]) == ["2"]
    with stage(make_config(per_episode=False, time_limit_s=3)) as found:
        outcome, _ = played(found, call_of("hangs"), "well")
        assert "'hangs' gave no answer within environment.time_limit_s=3 s" in outcome.error
        assert results_of(played(found, call_of("add", a=1, b=1), "well")[1]) == ["2"]


def test_a_server_that_does_not_end_is_killed_and_waited_for_by_nobody():
    """It ignores the end of its input, and its child holds its stderr open."""
    config = make_config(command=["python", str(SERVER), "stays"], per_episode=False)
    begin = time.monotonic()
    assert len(listed_tools(config)) > 1
    assert time.monotonic() - begin < 60
    with stage(config) as found:
        assert results_of(played(found, call_of("add", a=1, b=1), "well")[1]) == ["2"]
        mark = found.workers._mark
        assert len(find_by_variable(MARK, mark)) == 3
    assert not find_by_variable(MARK, mark)


def test_an_episode_has_a_server_of_its_own_or_shares_one(shared):
    twice = (call_of("counts"), call_of("counts"), "well")
    first = results_of(played(shared, *twice)[1])
    assert [int(each) for each in results_of(played(shared, *twice)[1])] == [
        int(first[1]) + 1,
        int(first[1]) + 2,
    ]
    with stage(make_config(env={"ODD": "yes"})) as found:
        for _ in range(2):
            assert results_of(played(found, *twice)[1]) == ["1", "2"]
        assert results_of(played(found, call_of("variable"), "well")[1]) == ["yes False"]
        outcome, _ = played(found, call_of("dies"), "well")
        assert "the server is gone" in outcome.error
        children = f"/proc/{found.workers._workers[0]._process.pid}/task"
        pids = [Path(children, task, "children").read_text() for task in os.listdir(children)]
        assert not "".join(pids).strip()


def test_turns_and_context_that_are_used_up(shared):
    call = call_of("add", a=1, b=1)
    outcome, record = played(shared, call, call, call, "never", max_turns=3)
    assert (outcome.answer, outcome.error) == ("", "")
    assert record.samples(3)[0].finish_reason == "length"
    outcome, record = played(shared, call, "well", context_len=20)
    assert outcome.answer is None
    assert "no room" in record.cut_off
    whole = played(shared, f"I add {call}", "two")[1].leaves[0].conversation.token_ids
    first = played(shared, "x")[1].leaves[0].conversation.prompt_len
    for context_len in range(first + 1, len(whole) + 1):
        outcome, record = played(shared, f"I add {call}", "two", context_len=context_len)
        (sample,) = record.samples(3)
        assert outcome.error == ""
        assert len(sample.token_ids) <= context_len
        assert sample.token_ids.tolist() == whole[: len(sample.token_ids)].tolist()
        is_cut = context_len - first < len(f"I add {call}")  # in the call, which then is none
        assert outcome.answer == ("I add " + call)[: context_len - first] if is_cut else True


@contextmanager
def over_http():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)

    def listens():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def test_http():
    with over_http() as (url, process):
        config = make_config(url=url, headers={"X-Key": "$HOME"}, tools=["add", "dies"])
        assert [tool["function"]["name"] for tool in listed_tools(config)] == ["add", "dies"]
        with stage(config) as found:
            assert results_of(played(found, call_of("add", a=1, b=1), "well")[1]) == ["2"]
            assert "no tool 'fails'" in results_of(played(found, call_of("fails"), "well")[1])[0]
            outcome, _ = played(found, call_of("dies"), "well")
            assert outcome.answer is None
            process.wait()
            outcome, _ = played(found, call_of("add", a=1, b=1), "well")
            assert "the server cannot be started or reached" in outcome.error


def test_a_template_with_tools_and_a_system_message():
    template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
        "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = call_of("calculate", a=3, op="-", b=4)
    for shown in ("template", "system"):
        with stage(make_config(CALCULATOR, show_tools=shown)) as found:
            if shown == "template":
                found.engine.tokenizer.chat_template = template
            outcome, record = played(found, f"I ask. {call}", "-1")
            assert (outcome.answer, outcome.error) == ("-1", "")
            assert results_of(record) == ["-1"]
            system = text_of(record).partition("<|im_start|>user")[0]
            assert "Compute a op b" in system
            assert ("# Tools" in system) == (shown == "system")
            assert f"I ask. {call}<|im_end|>" in text_of(record)


@pytest.mark.parametrize(
    ("mcp", "match"),
    [
        ({"command": [sys.executable, "-c", "print(1)"]}, "cannot be started or reached"),
        ({"command": ["no-such-server"]}, "environment.mcp.command: there is no program"),
        ({"command": ["python", "no_server.py"]}, "environment.mcp.command: there is no file"),
        ({"tools": ["add", "other"]}, "mcp.tools names 'other', but the servers have add"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be started or reached"),
        ({"url": "http://127.0.0.1:9/mcp", "headers": {"A": "$NO_SUCH_NAME"}}, "NO_SUCH_NAME"),
    ],
)
def test_servers_that_cannot_be_had(mcp, match):
    with pytest.raises(InputError, match=match) as caught:
        listed_tools(make_config(**mcp))
    assert "\n" not in str(caught.value)


def test_a_key_that_no_header_may_hold_is_not_shown(monkeypatch):
    monkeypatch.setenv("ODD_KEY", "secret\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        for value, match in (
            ("Bearer $ODD_KEY", "Authorization: .* it has a line break"),
            ("$", "dollar"),
        ):
            with pytest.raises(InputError, match=match) as caught:
                listed_tools(make_config(url=url, headers={"Authorization": value}))
            assert "secret" not in str(caught.value)
