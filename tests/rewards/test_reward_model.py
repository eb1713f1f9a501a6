import json

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForSequenceClassification,
)

from mrl.errors import InputError
from mrl.rewards import resolve_reward
from mrl.rewards.runner import RewardRunner
from mrl.toy_model import build_tokenizer
from tests.rewards.test_runner import group

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("reward_model"), build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    Qwen3MoeForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def loaded(spec):
    model = resolve_reward(spec)
    model.start_worker()
    return model


def expected(folder, text):
    """Transformers' own logit of one text, without padding."""
    model = Qwen3MoeForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor([build_tokenizer().encode(text)])
    with torch.inference_mode():
        return model(ids).logits.item()


def test_scores_of_plain_text_and_of_chats(folder):
    model = loaded(f"reward_model:{folder}?batch_size=2")
    texts = ["a", "longer text", "abc<|im_end|>\n"]  # more than a batch
    got = model(["p: "] * 3, texts, completion_ids=[])
    assert got == pytest.approx([expected(folder, f"p: {t}") for t in ("a", texts[1], "abc")])
    assert max(got) - min(got) > 0.1
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert model([CHAT], ["ho"]) == pytest.approx([expected(folder, chat)])
    with pytest.raises(ValueError, match="have 82 tokens, the reward model accepts 1 to 64"):
        model(["p" * 80], ["ab"])


def test_without_a_padding_token_each_text_goes_alone(folder, tmp_path):
    tmp_path.joinpath("m").symlink_to(folder)
    model = loaded(f"reward_model:{tmp_path}/m")
    before = model(["p", "p"], ["a", "longer"])
    model._model.config.pad_token_id = model._pad_id = None
    assert model(["p", "p"], ["a", "longer"]) == pytest.approx(before)


def test_an_encoder_does_not_look_at_the_padding(tmp_path):
    tokenizer = build_tokenizer()
    config = BertConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["a", "longer text"]
    alone = loaded(f"reward_model:{tmp_path}?batch_size=1")(["p"] * 2, texts)
    assert loaded(f"reward_model:{tmp_path}")(["p"] * 2, texts) == pytest.approx(alone, rel=1e-5)


@pytest.mark.release  # test_runner.py has the worker
def test_in_the_worker(folder):
    long = "x" * 100
    with RewardRunner(f"reward_model:{folder}", 60) as runner:
        rewards, _ = runner.score([group(2), group(2)], [["ab", long], ["ab"] * 2], step_samples=40)
    assert rewards[0].item() == pytest.approx(expected(folder, "pab"), rel=1e-5)
    assert rewards.isnan().tolist() == [False, True]
    assert "reward model accepts 1 to 64" in runner.report.first_error


def edited(folder, target, **changes):
    """The folder with another config.json."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("/gone", "is not a Hugging Face model folder"),
        ("?devise=cuda", "unknown option 'devise'; the options are device, dtype, batch_size"),
        ("?dtype=int3", "dtype 'int3', expected auto, float32"),
        ("?batch_size=0", "batch_size '0', expected 1 or more"),
    ],
)
def test_known_before_the_start(folder, tail, reason):
    with pytest.raises(InputError) as caught:
        resolve_reward(f"reward_model:{folder}{tail}")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_models_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match="expected reward_model:PATH"):
        resolve_reward("reward_model")
    causal = edited(folder, tmp_path / "causal", architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(InputError, match="is a Qwen3MoeForCausalLM, expected a"):
        resolve_reward(f"reward_model:{causal}")
    two = edited(folder, tmp_path / "two", id2label={"0": "bad", "1": "good"})
    with pytest.raises(InputError, match="has 2 labels, expected 1"):
        resolve_reward(f"reward_model:{two}")
    deeper = edited(folder, tmp_path / "deeper", num_hidden_layers=2)
    with pytest.raises(InputError, match=r"the checkpoint lacks model.layers.1"):
        loaded(f"reward_model:{deeper}")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="there is no GPU for device=cuda"):
            loaded(f"reward_model:{folder}?device=cuda")
