"""What a client may ask of a session: one kind of body for each operation, everything of it bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, ValidationError, model_validator

from mrl.algorithms import ppo
from mrl.config import AlgorithmConfig
from mrl.config.branch import Branch
from mrl.errors import InputError
from mrl.learn.named_losses import LOSSES
from mrl.rollout.base import MAX_STOP_STRINGS, SamplingParams
from mrl.rollout.sampling import check_sampling_params

MAX_TOKENS = 1 << 17
"""Tokens of one operation: of its sequences, or of its prompts and the longest answers to them."""
MAX_SEQUENCES = 4096
"""Sequences of one operation, or answers that it asks for."""
LARGEST = 3.4e38
"""The largest number, as a float32 holds it."""
TokenId = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Strict(), Field(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Strict(), Field(ge=1)]


@dataclass(frozen=True)
class Bounds:
    """A `Bounds` object says what sequences the model can take."""

    vocab_size: int
    context_len: int


class SequenceBody(Branch):
    """This is a sequence to train on. Index t of a list describes token t; the first is in no loss."""

    tokens: list[TokenId] = Field(min_length=2)
    weights: list[Number] | None = None
    """What each token counts in cross_entropy; by default 1."""
    advantages: list[Number] | None = None
    """The advantage of each token in the other losses; one with 0 is not in the loss."""
    logprobs: list[Number] | None = None
    """What each token was sampled with; the other losses compare with it."""
    weight: Number = 1.0
    """What the whole sequence counts."""
    sample: Annotated[str, Field(max_length=100)] | None = None
    """The id of the sample whose routes are replayed; it has the same tokens."""

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
        """Return the options of the loss as an algorithm reads them."""
        options = self.model_dump(include={"clip_low", "clip_high", "dual_clip"})
        return AlgorithmConfig(**options)


class OptimStepBody(Branch):
    kind: Literal["optim_step"]
    lr: Annotated[float, Strict(), Field(gt=0, le=1e3)] | None = None
    """Takes the place of that of the recipe in this step."""


class SampleBody(Branch):
    kind: Literal["sample"]
    prompts: list[list[TokenId]] = Field(min_length=1, max_length=MAX_SEQUENCES)
    n: Count = 1
    """Answers to each prompt."""
    max_tokens: Count
    """Tokens of the longest answer."""
    min_tokens: Annotated[int, Strict(), Field(ge=0)] = 0
    temperature: Number | None = None
    """0 takes the likeliest token; null takes that of the session's recipe."""
    top_p: Number = 1.0
    top_k: Annotated[int, Strict()] = -1
    stop: list[Annotated[str, Field(max_length=1000)]] = Field(
        default=[], max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: list[TokenId] = Field(default=[], max_length=1000)
    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 53)] | None = None
    """What the answers follow from; by default the recipe's seed and the operation's number."""

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
        """Return what a request asks of the engine; `temperature` is the session's own."""
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
    """Return what the body of an operation asks for. Raises InputError that says what is wrong."""
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"kind is {str(kind)[:80]!r}; expected one of {', '.join(KINDS)}")
    try:
        body = KINDS[kind].model_validate(given)
    except ValidationError as error:
        raise InputError(f"{kind}: {_first_problem(error)}") from None
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
    """Return how many tokens an operation has, or may come to have."""
    repeats = body.n if isinstance(body, SampleBody) else 1
    return repeats * sum(len(tokens) + more for tokens, more in _lengths(body))


def factors_of(sequence: SequenceBody) -> list[float]:
    """Return what each token counts in the loss."""
    for given in (sequence.weights, sequence.advantages):
        if given is not None:
            return given
    return [1.0] * len(sequence.tokens)


def _lengths(body: Body) -> list[tuple[Sequence[int], int]]:
    """Return the tokens that a body gives, each list with the number of those that may follow it."""
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


def _first_problem(error: ValidationError) -> str:
    """Return the first thing that is wrong, with its place and without what was given."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:80] for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
