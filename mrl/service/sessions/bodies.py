"""The bodies of the operations that a client may post to a session: one class for each kind of
operation. Every field has a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, ValidationError, model_validator

from mrl.algorithms import ppo
from mrl.config import AlgorithmConfig
from mrl.config.branch import Branch
from mrl.config.explain import first_problem
from mrl.engines.sampling import MAX_STOP_STRINGS, SamplingParams, check_sampling_params
from mrl.errors import InputError
from mrl.learn.named_losses import LOSSES

MAX_TOKENS = 1 << 17
"""Maximum number of tokens in one operation: in its sequences, or in its prompts and the longest
answers that it allows."""
MAX_SEQUENCES = 4096
"""Maximum number of sequences in one operation, or of answers that it asks for."""
LARGEST = 3.4e38
"""The largest allowed absolute value of a number, chosen so that the number fits into float32."""
TokenId = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Strict(), Field(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Strict(), Field(ge=1)]


@dataclass(frozen=True)
class Bounds:
    """Limits on a sequence, which depend on the model."""

    vocab_size: int
    context_len: int


class SequenceBody(Branch):
    """A sequence to train on. Index t of each list belongs to token t; the first token is never in
    the loss."""

    tokens: list[TokenId] = Field(min_length=2)
    weights: list[Number] | None = None
    """The weight of each token in `cross_entropy`; None gives every token the weight 1."""
    advantages: list[Number] | None = None
    """The advantage of each token, for losses other than `cross_entropy`. Tokens with advantage 0
    are not in the loss."""
    logprobs: list[Number] | None = None
    """The log-prob with which each token was sampled, for losses other than `cross_entropy`."""
    weight: Number = 1.0
    """Factor by which the loss of the sequence is multiplied."""
    sample: Annotated[str, Field(max_length=100)] | None = None
    """The id of the sample whose routes (the experts that the engine's router chose) are replayed.
    The sample must have the same tokens as this sequence. None: no routes are replayed."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        for name in ("weights", "advantages", "logprobs"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.tokens):
                raise ValueError(
                    f"{name} has {len(given)} numbers for {len(self.tokens)} tokens; give one each"
                )
        return self


class ForwardBody(Branch):
    kind: Literal["forward"]
    sequences: list[SequenceBody] = Field(min_length=1, max_length=MAX_SEQUENCES)

    @model_validator(mode="after")
    def _has_tokens_alone(self) -> Self:
        for number, each in enumerate(self.sequences):
            _forbid(number, each, ("weights", "advantages", "logprobs"), "forward")
        return self


class ForwardBackwardBody(Branch):
    kind: Literal["forward_backward"]
    loss: Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]
    sequences: list[SequenceBody] = Field(min_length=1, max_length=MAX_SEQUENCES)
    clip_low: Annotated[float, Strict(), Field(gt=0, le=1)] | None = None
    clip_high: Annotated[float, Strict(), Field(gt=0)] | None = None
    dual_clip: Annotated[float, Strict(), Field(gt=1)] | None = None

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        named = LOSSES[self.loss]
        for name in ("clip_low", "clip_high", "dual_clip"):
            if getattr(self, name) is not None and name not in named.options:
                raise ValueError(f"{name} is not read by the loss {self.loss}; leave it out")
        high = ppo.CLIP_HIGH if self.clip_high is None else self.clip_high
        if self.dual_clip is not None and self.dual_clip <= 1 + high:
            raise ValueError(
                f"dual_clip is {self.dual_clip:g}, expected above 1 + clip_high = {1 + high:g}"
            )
        other = ("advantages", "logprobs") if not named.is_ratio else ("weights",)
        for number, each in enumerate(self.sequences):
            _forbid(number, each, other, self.loss)
            if named.is_ratio and (each.advantages is None or each.logprobs is None):
                raise ValueError(
                    f"sequence {number}: {self.loss} needs advantages and logprobs; give both"
                )
        if not any(factor for each in self.sequences for factor in factors_of(each)[1:]):
            raise ValueError("no token has a weight or an advantage; there is nothing to train on")
        return self

    def config(self) -> AlgorithmConfig:
        """Return the options of the loss as the configuration of an algorithm."""
        return AlgorithmConfig(**self.model_dump(include={"clip_low", "clip_high", "dual_clip"}))


class OptimStepBody(Branch):
    kind: Literal["optim_step"]
    lr: Annotated[float, Strict(), Field(gt=0, le=1e3)] | None = None
    """Replaces the recipe's learning rate in this step; None keeps it."""


class SampleBody(Branch):
    kind: Literal["sample"]
    prompts: list[list[TokenId]] = Field(min_length=1, max_length=MAX_SEQUENCES)
    n: Count = 1
    """Number of answers to each prompt."""
    max_tokens: Count
    """Maximum number of tokens of an answer."""
    min_tokens: Annotated[int, Strict(), Field(ge=0)] = 0
    temperature: Number | None = None
    """The sampling temperature; 0 always takes the likeliest token. None takes the temperature of
    the session's recipe."""
    top_p: Number = 1.0
    top_k: Annotated[int, Strict()] = -1
    stop: list[Annotated[str, Field(max_length=1000)]] = Field(
        default=[], max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: list[TokenId] = Field(default=[], max_length=1000)
    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 53)] | None = None
    """Seed of the answers. None derives the seed from the recipe's seed and the number of the
    operation."""

    @model_validator(mode="after")
    def _can_be_sampled(self) -> Self:
        self.sampling(1.0)
        for number, prompt in enumerate(self.prompts):
            if not prompt:
                raise ValueError(f"prompt {number} has no token")
        if len(self.prompts) * self.n > MAX_SEQUENCES:
            raise ValueError(
                f"{len(self.prompts)} prompts with n={self.n} are more than {MAX_SEQUENCES} answers"
            )
        return self

    def sampling(self, temperature: float) -> SamplingParams:
        """Return the sampling parameters for the engine. `temperature`: the sampling temperature in
        the session's recipe, for a body without a temperature."""
        return SamplingParams(
            max_new_tokens=self.max_tokens,
            min_new_tokens=self.min_tokens,
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=tuple(self.stop_token_ids),
            stop=tuple(self.stop),
        )


class SaveBody(Branch):
    kind: Literal["save"]


class LoadBody(Branch):
    kind: Literal["load"]
    version: Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
    """The version of a checkpoint of this session, as `save` returned it."""


Body = ForwardBody | ForwardBackwardBody | OptimStepBody | SampleBody | SaveBody | LoadBody
KINDS: dict[str, type[Body]] = {
    "forward_backward": ForwardBackwardBody,
    "optim_step": OptimStepBody,
    "sample": SampleBody,
    "forward": ForwardBody,
    "save": SaveBody,
    "load": LoadBody,
}


def read_body(given: dict[str, Any], bounds: Bounds) -> Body:
    """Return the body of an operation, checked against the model's `bounds`. Raises InputError with
    a message that says what is wrong."""
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"kind is {str(kind)[:80]!r}; expected one of {', '.join(KINDS)}")
    try:
        body = KINDS[kind].model_validate(given)
    except ValidationError as error:
        raise InputError(f"{kind}: {first_problem(error)}") from None
    if isinstance(body, SampleBody):
        sampling = body.sampling(1.0)
        check_sampling_params(sampling, bounds.vocab_size, "sample: ", min_name="min_tokens")
    for number, (tokens, more) in enumerate(_lengths(body)):
        _check_tokens(f"{kind}: {'prompt' if more else 'sequence'} {number}", tokens, more, bounds)
    if (total := num_tokens(body)) > MAX_TOKENS:
        raise InputError(
            f"{kind}: {total} tokens; an operation has at most {MAX_TOKENS}, so split it"
        )
    return body


def num_tokens(body: Body) -> int:
    """Return the number of tokens of an operation. For `sample`, each answer counts as its prompt
    plus its maximum length."""
    repeats = body.n if isinstance(body, SampleBody) else 1
    return repeats * sum(len(tokens) + more for tokens, more in _lengths(body))


def factors_of(sequence: SequenceBody) -> list[float]:
    """Return the factor of each token in the loss: its weight, its advantage, or 1 if the sequence
    has neither list."""
    return sequence.weights or sequence.advantages or [1.0] * len(sequence.tokens)


def _lengths(body: Body) -> list[tuple[Sequence[int], int]]:
    """Return each list of tokens in a body, with the number of tokens that may be generated after
    it."""
    if isinstance(body, SampleBody):
        return [(prompt, body.max_tokens) for prompt in body.prompts]
    if isinstance(body, (ForwardBody, ForwardBackwardBody)):
        return [(each.tokens, 0) for each in body.sequences]
    return []


def _check_tokens(what: str, tokens: Sequence[int], more: int, bounds: Bounds) -> None:
    if (largest := max(tokens)) >= bounds.vocab_size:
        raise InputError(
            f"{what}: token {largest} is not below {bounds.vocab_size}, the vocabulary"
        )
    if len(tokens) + more > bounds.context_len:
        answer = f" and {more} of an answer" if more else ""
        raise InputError(
            f"{what}: {len(tokens)} tokens{answer} are more than the context of {bounds.context_len}"
        )


def _forbid(number: int, given: SequenceBody, names: Sequence[str], reader: str) -> None:
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"sequence {number}: {name} is not read by {reader}; leave it out")
