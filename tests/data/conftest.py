"""A tokenizer of one token per character, so that lengths in tokens can be counted by eye."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["<eos>"] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return fast
