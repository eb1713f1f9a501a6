import json
from pathlib import Path

import pytest

from mrl.config import DataConfig, load_recipe
from mrl.data.eval_sets import read_eval_sets
from mrl.data.reader import read_prompts, read_sft_examples, read_sources
from mrl.errors import InputError

TOY_RECIPE = Path(__file__).parents[2] / "launch/recipes/toy_moe.yaml"


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "rows.jsonl"
        text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_string_and_messages_and_columns(write, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    path = write({"prompt": "abc", "answer": 1, "info": {"k": [2]}}, "", {"prompt": messages})
    first, second = read_prompts(path, tokenizer, max_prompt_len=64)
    assert tokenizer.decode(first.token_ids) == "abc"
    assert first.columns == {"answer": 1, "info": {"k": [2]}}
    assert first.content == "abc"
    assert tokenizer.decode(second.token_ids) == "user:hi|assistant:"
    assert second.content == messages
    assert (first.prompt_id, second.prompt_id) == ("0", "1")
    assert second.source == f"{path}:3"


def test_line_separators_inside_json_do_not_split_rows(write, tokenizer):
    path = write('{"prompt": "a\u2028b\u0085c"}', {"prompt": "d"})
    prompts = read_prompts(path, tokenizer, max_prompt_len=64)
    assert [p.content for p in prompts] == ["a\u2028b\u0085c", "d"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "not valid JSON at column 2: "),
        (
            '{"prompt": "a"',
            "at column 15: Expecting ',' delimiter; one JSON object a line is expected",
        ),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "got a list; a JSON array of rows needs a file name that ends with .json"),
        ({"question": "x"}, "no `prompt`"),
        ({"prompt": None}, "no `prompt`"),
        ({"prompt": 3}, "must be a string or a list of messages, got a number"),
        ({"prompt": True}, "got a boolean"),
        ({"prompt": {}}, "got an object"),
        ({"prompt": ""}, "`prompt` is empty"),
        ({"prompt": " \n"}, "`prompt` is empty"),
        ({"prompt": []}, "`prompt` is empty"),
        ({"prompt": ["hi"]}, "message 0 must be an object, got a string"),
        ({"prompt": [{"content": "hi"}]}, "message 0 has no text in `role`"),
        (
            {"prompt": [{"rol": "user", "content": "a"}]},
            "it has rol, content, expected role and content",
        ),
        ({"prompt": [{"role": "user"}]}, "message 0 has no text in `content`"),
    ],
)
def test_bad_row_is_named_by_file_and_line(write, tokenizer, row, reason):
    path = write({"prompt": "fine", "completion": "x"}, row)
    for read in (lambda: read_prompts(path, tokenizer, max_prompt_len=64),
                 lambda: read_sft_examples(path, tokenizer)):  # fmt: skip
        with pytest.raises(InputError) as caught:
            read()
        assert str(caught.value).startswith(f"{path}:2: ")
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=r":1: not UTF-8"):
        read_prompts(path, tokenizer, max_prompt_len=64)


def test_prompt_length_is_checked_to_the_token(write, tokenizer):
    path = write({"prompt": "a" * 10}, {"prompt": "a" * 11})
    assert len(read_prompts(path, tokenizer, max_prompt_len=11)) == 2
    with pytest.raises(InputError) as caught:
        read_prompts(path, tokenizer, max_prompt_len=10, max_response_len=6)
    assert f"{path}:2: prompt has 11 tokens, at most 10 fit (context 16 - response 6)" in str(
        caught.value
    )


def test_an_evaluation_set_with_a_prompt_too_long_is_not_told_of_an_option_that_leaves_it_alone(
    write, tokenizer
):
    path = write({"prompt": "a" * 11})
    given = f"eval.sets=[{{name: long, path: {path}, max_response_len: 6}}]"
    recipe = load_recipe(TOY_RECIPE, [given, "data.overlong=filter"])
    assert len(read_eval_sets(recipe, tokenizer, 17)[0].prompts) == 1
    with pytest.raises(InputError, match="smaller max_response_len of the evaluation") as caught:
        read_eval_sets(recipe, tokenizer, 16)
    assert "overlong" not in str(caught.value)
    with pytest.raises(InputError, match=r"set data\.overlong to filter"):
        read_prompts(path, tokenizer, max_prompt_len=10)


def test_missing_empty_and_short_files(write, tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"nothing\.jsonl: No such file"):
        read_prompts(tmp_path / "nothing.jsonl", tokenizer, max_prompt_len=9)
    with pytest.raises(InputError, match="no rows"):
        read_prompts(write("", "  "), tokenizer, max_prompt_len=9)
    with pytest.raises(InputError, match="1 prompts, a step needs 2"):
        read_prompts(write({"prompt": "a"}), tokenizer, max_prompt_len=9, min_rows=2)


def test_messages_need_a_template_that_accepts_them(write, tokenizer, monkeypatch):
    path = write({"prompt": [{"role": "user", "content": "hi"}]})
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r":1: the chat template refuses .*roles must alternate"):
        read_prompts(path, tokenizer, max_prompt_len=64)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(InputError, match=r":1: .*no chat template; give a string, or put"):
        read_prompts(path, tokenizer, max_prompt_len=64)


def test_sft_examples_end_with_eos(write, tokenizer):
    (row,) = read_sft_examples(write({"prompt": "ab=", "completion": "12"}), tokenizer)
    assert tokenizer.decode(row.token_ids) == "ab=12<eos>"
    assert row.prompt_len == 3
    for completion in ("", 12, None):
        with pytest.raises(InputError, match=r":1: `completion` must be a string"):
            read_sft_examples(write({"prompt": "a", "completion": completion}), tokenizer)
    with pytest.raises(InputError, match=r":1: prompt and completion have 6 tokens, at most 5"):
        read_sft_examples(write({"prompt": "ab=", "completion": "12"}), tokenizer, max_len=5)


def test_sources_that_would_share_a_metric_key_are_refused(tmp_path, tokenizer):
    files = [tmp_path / "a b.jsonl", tmp_path / "a_b.jsonl"]
    for file in files:
        file.write_text('{"prompt": "x"}\n')
    sources = [{"path": str(file)} for file in files]
    match = r"the sources 'a b.jsonl' and 'a_b.jsonl' would share the metrics source/a_b.jsonl/"
    with pytest.raises(InputError, match=match):
        read_sources(DataConfig(sources=sources), tokenizer, max_prompt_len=64)
    named = DataConfig(sources=[sources[0], sources[1] | {"name": "other"}])
    assert len(read_sources(named, tokenizer, max_prompt_len=64)) == 2
