"""Rows of TRL, ShareGPT and verl become prompts; tools reach the template; long prompts are cut."""

import json

import pytest

from mrl.config import DataConfig
from mrl.data.forms import read_form
from mrl.data.reader import read_prompts, read_sft_examples, read_sources
from mrl.errors import InputError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}
SYSTEM = {"role": "system", "content": "s"}
TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% if enable_thinking is false %}<no>{% endif %}{% endif %}"
)


def form(row, prompt_key=None, **columns):
    return read_form("f:1", dict(row), prompt_key, columns)


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def chat_tokenizer(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return tokenizer


def test_messages_with_and_without_an_answer():
    row = form({"messages": [USER, ANSWER], "answer": 1})
    assert (row.prompt, row.completion) == ([USER], "ho")
    assert row.columns == {"answer": 1, "completion": "ho"}
    assert form({"messages": [SYSTEM, USER]}).prompt == [SYSTEM, USER]
    # A prompt that ends with an assistant's message is what its author wants it to be.
    assert form({"prompt": [USER, ANSWER]}).prompt == [USER, ANSWER]


def test_sharegpt():
    talk = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "ho"}]  # fmt: skip
    row = form({"conversations": talk, "id": "x"})
    assert (row.prompt, row.completion) == ([SYSTEM, USER], "ho")
    with pytest.raises(
        InputError, match="message 0 of `conversations` is from 'cat', expected one of"
    ):
        form({"conversations": [{"from": "cat", "value": "m"}]})
    with pytest.raises(InputError, match=r"message 0 of `conversations` is from \{\}, expected"):
        form({"conversations": [{"from": {}, "value": "m"}]})


def test_verl_rows():
    row = form({
        "data_source": "openai/gsm8k", "prompt": [USER], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 3},
    })  # fmt: skip
    assert row.prompt == [USER]
    assert row.columns["answer"] == "72"
    assert {"data_source", "reward_model", "extra_info"} <= row.columns.keys()
    assert row.form == "verl rows, `prompt`"


def test_columns_get_new_names():
    row = form({"question": "q", "meta": {"gold": 7}, "solution": "s", "image": "i"},
               "question", answer="meta.gold", worked="solution", image=None)  # fmt: skip
    assert row.prompt == "q"
    assert row.columns == {"meta": {"gold": 7}, "answer": 7, "worked": "s"}
    swapped = form({"prompt": "p", "a": 1, "b": 2}, a="b", b="a")
    assert swapped.columns == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"q": "x", "a": 1}, {}, "f:1: no `prompt`; this row has q, a; name the column"),
        ({"q": "x"}, {"prompt_key": "text"}, "f:1: no `text`; this row has q"),
        (
            {"prompt": "x"},
            {"answer": "gold"},
            "f:1: no column `gold`, which data.columns names for",
        ),
        ({"messages": [ANSWER]}, {}, "f:1: `messages` has nothing before the assistant's turn"),
        ({"messages": "hi"}, {}, "f:1: `messages` must be a list of messages, got a string"),
    ],
)
def test_errors_name_the_columns_that_were_there(row, options, reason):
    with pytest.raises(InputError) as caught:
        form(row, **options)
    assert reason in str(caught.value)


def test_null_keys_of_parquet_messages_are_no_keys():
    row = form({"messages": [{**USER, "tool_calls": None, "name": None}]})
    assert row.prompt == [USER]


def test_sft_takes_the_same_forms(write, chat_tokenizer):
    path = write({"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]})
    config = DataConfig(path=path, chat_template_kwargs={"enable_thinking": False})
    # The form is that of each row.
    for example in read_sft_examples(config, chat_tokenizer):
        assert chat_tokenizer.decode(example.token_ids) == "u:hi|a:<no>ho<eos>"
    with pytest.raises(InputError, match=r":1: `completion` must be .* this row has answer"):
        read_sft_examples(write({"messages": [USER], "answer": 1}), chat_tokenizer)


def test_tools_and_arguments_reach_the_template(write, chat_tokenizer):
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = write({"prompt": [USER], "tools": tools}, {"prompt": [USER], "tools": json.dumps(tools)},
                 {"prompt": [USER], "tools": None}, {"prompt": "text", "tools": tools})  # fmt: skip
    config = DataConfig(path=path, chat_template_kwargs={"enable_thinking": False})
    (source,) = read_sources(config, chat_tokenizer, max_prompt_len=99)
    texts = [chat_tokenizer.decode(prompt.token_ids) for prompt in source.prompts]
    assert texts == ["[1 tools]u:hi|a:<no>"] * 2 + ["u:hi|a:<no>", "text"]
    assert source.num_with_tools == 2
    with pytest.raises(
        InputError, match=r":1: `tools` must be a list of JSON schemas, got an object"
    ):
        read_prompts(
            write({"prompt": [USER], "tools": {"a": 1}}), chat_tokenizer, max_prompt_len=99
        )


def test_long_prompts_are_left_out_and_counted(write, tokenizer, monkeypatch):
    path = write({"prompt": "a" * 9}, {"prompt": "b" * 12}, {"prompt": "c" * 10})
    config = DataConfig(path=path, overlong="filter")
    (source,) = read_sources(config, tokenizer, max_prompt_len=10)
    assert [prompt.content[0] for prompt in source.prompts] == ["a", "c"]
    assert [prompt.prompt_id for prompt in source.prompts] == ["0", "2"]  # rows keep their numbers
    said = "2 prompts from `prompt` (string), 1 too long and left out"
    assert source.describe() == f"{said}, strings do not go through the chat template"
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (source,) = read_sources(config, tokenizer, max_prompt_len=10)
    assert source.describe() == said
    with pytest.raises(InputError, match=r"2 prompts \(1 more are too long and left out\), a step"):
        read_sources(config, tokenizer, max_prompt_len=10, min_rows=3)
    with pytest.raises(InputError, match="all 3 prompts are longer than 5 tokens"):
        read_sources(config, tokenizer, max_prompt_len=5)


def test_long_prompts_are_cut_at_their_beginning(write, chat_tokenizer):
    def turn(role, text):
        return {"role": role, "content": text}

    chat = [SYSTEM, turn("user", "one"), turn("assistant", "1"), turn("tool", "t"),
            turn("user", "two"), turn("assistant", "2"), turn("user", "three")]  # fmt: skip
    path = write({"prompt": "0123456789"}, {"prompt": chat})
    config = DataConfig(path=path, overlong="truncate_left")

    def read(max_len):
        (source,) = read_sources(config, chat_tokenizer, max_prompt_len=max_len)
        assert all(len(prompt.token_ids) <= max_len for prompt in source.prompts)
        texts = [chat_tokenizer.decode(prompt.token_ids) for prompt in source.prompts]
        return texts, source

    whole = "s:s|u:one|a:1|t:t|u:two|a:2|u:three|a:"
    texts, source = read(len(whole))
    assert (texts[1], source.num_truncated) == (whole, 0)
    texts, source = read(len(whole) - 1)
    assert texts[1] == "s:s|u:two|a:2|u:three|a:"
    assert source.prompts[1].content == [SYSTEM, *chat[4:]]
    texts, source = read(14)
    assert texts == ["0123456789", "s:s|u:three|a:"]
    assert ("2 prompts from `prompt` (string) and `prompt` (messages), 1 cut at the beginning"
            in source.describe())  # fmt: skip
    with pytest.raises(
        InputError, match=r":2: prompt has 38 tokens, at most 9 fit, and a chat cannot"
    ):
        read(9)
    path = write({"prompt": "0123456789"})
    (prompt,) = read_prompts(
        DataConfig(path=path, overlong="truncate_left"), chat_tokenizer, max_prompt_len=4
    )
    assert (prompt.content, chat_tokenizer.decode(prompt.token_ids)) == ("6789", "6789")


def test_a_source_takes_several_rewards(write, chat_tokenizer):
    several = [{"path": "first_char"}, {"path": "repeat", "weight": 0.5, "name": "twice"}]
    path = write({"prompt": "ab"})
    sources = [
        {"path": path, "reward": several},
        {"path": path, "reward": "first_char"},
        {"path": path},
    ]
    config = DataConfig.model_validate({"sources": sources})
    found = [s.prompts[0] for s in read_sources(config, chat_tokenizer, max_prompt_len=99)]
    assert [each.reward for each in found] == [
        "1 first_char + 0.5 repeat (twice)", "first_char", None,
    ]  # fmt: skip
    assert [len({each.source_name for each in found}), config.has_all_rewards] == [3, False]
    assert [isinstance(each, str) for each in config.rewards.values()] == [False, True]
    twice = [several[0], several[0]]
    with pytest.raises(ValueError, match="the name first_char occurs twice"):
        DataConfig.model_validate({"sources": [{"path": "a", "reward": twice}]})
    (alone,) = read_prompts(DataConfig(path=path), chat_tokenizer, max_prompt_len=99)
    assert alone.source_name is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "neither is given"),
        ({"path": "a", "sources": [{"path": "b"}]}, "both are given"),
        (
            {"sources": [{"path": "a", "weight": 1}, {"path": "b"}]},
            "every source a weight, or none",
        ),
        (
            {"sources": [{"path": "a", "name": "x"}, {"path": "b", "name": "x"}]},
            "expected each once",
        ),
        ({"path": "a", "chat_template_kwargs": {"tools": []}}, "mrl sets 'tools' itself"),
    ],
)
def test_a_wrong_config_is_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        DataConfig.model_validate(config)


def test_a_role_that_nobody_knows_is_named(write, chat_tokenizer, monkeypatch):
    """The template would write it as it is, and others leave the message out."""
    rows = write({"prompt": [USER]}, {"prompt": [SYSTEM, {**USER, "role": "usr"}]})
    with pytest.raises(InputError, match=r":2: message 1 has the role 'usr', expected one of sys"):
        read_prompts(rows, chat_tokenizer, max_prompt_len=64)
    template = '{% if m["role"] == "usr" %}{% endif %}'
    monkeypatch.setattr(
        chat_tokenizer, "chat_template", TEMPLATE + template.replace("m[", "messages[0][")
    )
    assert len(read_prompts(rows, chat_tokenizer, max_prompt_len=64)) == 2


def test_pairs_of_preferences_are_no_prompts():
    with pytest.raises(InputError, match="this row has chosen, rejected: preference pairs"):
        form({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]})
    assert form({"prompt": "a", "chosen": "b", "rejected": "c"}).columns == {
        "chosen": "b",
        "rejected": "c",
    }


def test_a_column_may_be_renamed_and_its_old_name_dropped():
    for columns in (
        {"question": None, "prompt": "question"},
        {"prompt": "question", "question": None},
    ):
        row = read_form("f:1", {"question": "q", "answer": "a"}, None, columns)
        assert (row.prompt, row.columns) == ("q", {"answer": "a"})
