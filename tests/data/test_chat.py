import json

import pytest
import torch

from mrl.data.chat import ChatTurns
from mrl.errors import InputError
from mrl.toy_model import CHAT_TEMPLATE, EOS, build_tokenizer
from mrl.types import Prompt

CHAT = Prompt("0", torch.tensor([1, 2]), [{"role": "user", "content": "hi"}], {}, "f:1")
TEXT = Prompt("0", torch.tensor([1, 2]), "hi", {}, "f:1")
NEXT = "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_between_turns(tokenizer):
    turns = ChatTurns(tokenizer)
    turns.check()
    eos, letter = tokenizer.eos_token_id, tokenizer.encode("a")[0]
    assert tokenizer.decode(turns.between(CHAT, eos, "no")) == NEXT  # the policy ended its turn
    assert tokenizer.decode(turns.between(CHAT, letter, "no")) == EOS + NEXT  # it was cut short
    tool = [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]
    assert tokenizer.decode(turns.between(CHAT, eos, tool)) == (
        "\n<|im_start|>tool\nx<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_whole_conversation_reads_as_the_template_would_have_it(tokenizer):
    turns = ChatTurns(tokenizer)
    talk = [{"role": "user", "content": "hi"}, {"role": "user", "content": "there"}]
    ids = turns.start(CHAT, "there") + tokenizer.encode("hello") + [tokenizer.eos_token_id]
    ids += turns.between(CHAT, ids[-1], "no")
    talk += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "no"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == text


def test_plain_text(tokenizer):
    turns = ChatTurns(tokenizer)
    assert turns.start(TEXT, None) == [1, 2]
    assert turns.start(TEXT, "ab") == [1, 2, *tokenizer.encode("ab")]
    assert turns.between(TEXT, tokenizer.eos_token_id, "ab") == tokenizer.encode("ab")
    with pytest.raises(ValueError, match="the prompt is a string"):
        turns.between(TEXT, 1, [{"role": "tool", "content": "x"}])


THINKING = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ message['content'] }}",
)
"""Like Qwen3's, it puts another text before the assistant's last turn. It is not used."""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHAT_TEMPLATE, None),
        (THINKING, None),
        (None, "there is none"),
        (
            CHAT_TEMPLATE.replace("<|im_end|>", "{% if loop.last %}!{% endif %}"),
            "but continues with",
        ),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'][:3]"), "exactly once"),
        (CHAT_TEMPLATE.replace("<|im_end|>", " <|im_end|>"), "followed by ' ', expected a token"),
        (CHAT_TEMPLATE.replace("<|im_end|>", ""), "expected a token that ends a generation"),
        ("{{ raise_exception('no tools') }}", "refuses messages of roles ['user', 'assistant'"),
    ],
)
def test_a_template_is_checked_once_at_the_start(template, reason):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    if reason is None:
        ChatTurns(tokenizer).check()
        assert tokenizer.decode(ChatTurns(tokenizer).between(CHAT, 1, "no")) == EOS + NEXT
        return
    with pytest.raises(InputError) as caught:
        ChatTurns(tokenizer).check()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_the_model_may_stop_at_more_tokens_than_the_tokenizer(name, tmp_path):
    """Llama 3's tokenizer has one such token, and its turns end with another."""
    tokenizer = build_tokenizer()
    turn_end = tokenizer.eos_token_id
    tokenizer.eos_token = "a"
    with pytest.raises(InputError, match=r"'<\|im_end\|>', expected a token .* 'a'"):
        ChatTurns(tokenizer).check()
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [turn_end, 5]}))
    ChatTurns(tokenizer).check()
    (tmp_path / name).write_text(json.dumps({"eos_token_id": turn_end}))
    ChatTurns(tokenizer).check()
