"""Samples as conversations: turns, thoughts, tool calls and results."""

from __future__ import annotations

import json
import time

import pytest

from mrl.view.live.turns import turns_of

CHATML = (
    "<think>\nlet me look\n</think>\nI ask.\n<tool_call>\n"
    '{"name": "search", "arguments": {"query": "x < y"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\nIt is 42.<|im_end|>"
)
CALL = json.dumps({"query": "x < y"}, indent=2)


def parts(completion: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [(turn.role, turn.parts) for turn in turns_of("why?", completion)[1:]]


def test_tool_calls_of_chatml() -> None:
    assert turns_of("why?", "")[0].parts == [("text", "", "why?")]
    assert parts(CHATML) == [
        (
            "assistant",
            [("thought", "", "let me look"), ("text", "", "I ask."), ("call", "search", CALL)],
        ),
        ("tool", [("result", "", "42")]),
        ("assistant", [("text", "", "It is 42.")]),
    ]


@pytest.mark.parametrize(
    ("completion", "roles", "kinds"),
    [
        ("plain", "assistant", "text"),
        ("", "assistant", "text"),
        ("so</think>yes", "assistant", "thought text"),
        ("<think>cut off", "assistant", "thought"),
        ("<tool_call>not json", "assistant", "call"),
        ("<tool_call><function=f>\n<parameter=a>\n1\n</parameter></function></tool_call>",
         "assistant", "call"),
        ("hm<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|>", "assistant tool",
         "text result"),
        ("hm<end_of_turn>\n<start_of_turn>user\nno<end_of_turn>\n<start_of_turn>model\nok",
         "assistant user assistant", "text text text"),
        ("hm<|observation|>\n7<|assistant|>\nok", "assistant tool assistant", "text result text"),
        ("<|channel|>x<|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>",
         "assistant assistant", "text thought"),
        ("hm<\uff5cend\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>no<\uff5cAssistant\uff5c>ok",
         "assistant user assistant", "text text text"),
        ('[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": 1}"}, 7]', "assistant", "call call"),
    ],
)  # fmt: skip
def test_notations_of_templates(completion: str, roles: str, kinds: str) -> None:
    found = parts(completion)
    assert [role for role, _ in found] == roles.split()
    assert [kind for _, own in found for kind, _, _ in own] == kinds.split()


def test_messages_keep_their_tool_calls() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}, "odd"]},
        {"role": "tool", "name": "f", "content": "7"},
        "odd",
        {},
    ]  # fmt: skip
    found = [turn.parts for turn in turns_of(messages, "done")]
    assert found[0] == [("text", "", "a"), ("text", "", '{"type": "image"}')]
    assert found[1] == [
        ("thought", "", "hm"),
        ("call", "f", '{\n  "a": 1\n}'),
        ("call", "", '"odd"'),
    ]
    assert found[2] == [("result", "f", "7")]
    assert found[-1] == [("text", "", "done")]


@pytest.mark.parametrize(
    "piece",
    ["<tool_call><function=f><parameter=a>", "<think>", "</think>", "<|im_start|>", "<|im_start|>a ",
     "<|start|>a<|channel|>a", "<|start_header_id|> ", "</s> ", "[TOOL_CALLS]", "<tool_response>"],
)  # fmt: skip
def test_no_text_takes_long(piece: str) -> None:
    begin = time.process_time()
    turns_of("x", piece * (100_000 // len(piece)))
    turns_of("x", piece + "a" * 100_000)
    assert time.process_time() - begin < 3
