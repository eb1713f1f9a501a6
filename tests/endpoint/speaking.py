"""An engine without a model for tests of the endpoint: it answers with texts that the test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mrl.collect.endpoint.generation import Generation
from mrl.collect.endpoint.record import EpisodeRecord
from mrl.collect.endpoint.texts import Texts
from mrl.data.chat import ChatTurns
from mrl.engines.base import Completion, Request
from mrl.engines.sampling import SamplingParams
from mrl.toy_model import build_tokenizer
from mrl.types import Prompt, RoutingTrace, VersionSpan

SAMPLING = SamplingParams(40)
QUESTION = [{"role": "user", "content": "question"}]


class Speaking:
    """A `PolicyEndpoint` that says `say(request)` and then ends its turn, unless that is too long.

    Log-probs and routes are functions of the position and the token, so that mixed-up ones are seen.
    """

    weight_version = 3

    def __init__(self, tokenizer: Any, say: Callable[[Request], str] = lambda request: "hello"):
        self.tokenizer, self.say = tokenizer, say
        self.asked: list[Request] = []
        self.num_calls = 0
        self.aborted: list[str] = []
        self._lock = threading.Lock()

    def generate(self, requests: Sequence[Request], **options: bool) -> Iterator[Completion]:
        assert options["concurrent"]
        with self._lock:
            self.asked += requests
            self.num_calls += 1
        for request in requests:
            yield self.complete(request, self.say(request))

    def complete(self, request: Request, text: str) -> Completion:
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        most = request.sampling.max_new_tokens
        reason = "stop" if len(ids) <= most else "length"
        output = torch.tensor(ids[:most])
        start, end = len(request.token_ids), len(request.token_ids) + len(output)
        whole = torch.cat([request.token_ids, output])
        return Completion(
            request.request_id,
            output,
            logprobs_of(whole)[start:],
            reason,
            (VersionSpan(self.weight_version, start, end),),
            routes_of(whole),
        )

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.aborted += request_ids or []


def logprobs_of(tokens: torch.Tensor) -> torch.Tensor:
    return -(torch.arange(len(tokens)) * 128.0 + tokens) / 65536


def routes_of(tokens: torch.Tensor) -> RoutingTrace:
    rows = (torch.arange(len(tokens) - 1) + tokens[:-1]) % 7
    ids = torch.stack([rows, rows + 1], 1)[:, None].to(torch.uint8)
    return RoutingTrace(ids, (1,), 8, (VersionSpan(Speaking.weight_version, 0, len(ids)),), 0)


def make_texts(tokenizer: Any) -> Texts:
    return Texts(tokenizer, {})


def make_prompt(tokenizer: Any, content: Any = None, **columns: Any) -> Prompt:
    content = QUESTION if content is None else content
    turns = ChatTurns(tokenizer)
    is_text = isinstance(content, str)
    ids = turns.encode(content) if is_text else turns.beginning(content, None)
    return Prompt("0", torch.tensor(ids), content, columns, "rows:1")


def make_record(engine: Speaking, **settings: Any) -> EpisodeRecord:
    settings = {"sampling": SAMPLING, "context_len": 500, "max_turns": 20, **settings}
    generation = Generation({})
    generation.open(engine)
    tokenizer = engine.tokenizer
    return EpisodeRecord(
        make_prompt(tokenizer), 4, "rows:1 group 4 sample 0", 11, make_texts(tokenizer), generation,
        **settings,
    )  # fmt: skip


def tokenizer() -> Any:
    return build_tokenizer()


def byte_tokenizer() -> Any:
    """A tokenizer with one token per byte, so that most characters beyond ASCII have several tokens."""
    toy = build_tokenizer()
    special = ["<|im_start|>", toy.eos_token]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*letters, *special])}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=toy.eos_token,
        additional_special_tokens=special[:1],
        chat_template=toy.chat_template,
        clean_up_tokenization_spaces=False,
    )
