"""The bodies of the operations that a client may post to a session: one class for each kind of
operation. Every field has a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, ValidationError, model_validator

from mrl.algorithms import ppo
from mrl.config import AlgorithmConfig, SharedRolloutConfig
from mrl.config.branch import Branch
from mrl.config.explain import first_problem
from mrl.engines.sampling import MAX_STOP_STRINGS, SamplingParams, check_sampling_params
from mrl.errors import InputError
from mrl.learn.named_losses import LOSSES, LossOptions
from mrl.service.sessions.sequence import (
    LARGEST,
    PER_TOKEN,
    Number,
    SequenceBody,
    TokenId,
    factors_of,
)
from parallel.hf_config import HfModel
from parallel.optimizer.adam_step import AdamStep

MAX_TOKENS = 1 << 17
"""Maximum number of tokens in one operation: in its sequences, or in its prompts and the longest
answers that it allows."""
MAX_SEQUENCES = 4096
"""Maximum number of sequences in one operation, or of answers that it asks for."""
Count = Annotated[int, Strict(), Field(ge=1)]
NotNegative = Annotated[float, Strict(), Field(ge=0, le=LARGEST)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1)]
Name = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""The name of a saved state or sampler, which is the name of its folder."""
BASE = "@base"
"""The sampler without an adapter: the base model."""
MAX_TOP = 20
"""Maximum number of likeliest tokens that are returned for each token of a prompt."""


@dataclass(frozen=True)
class Bounds:
    """Limits on a sequence, which depend on the model."""

    vocab_size: int
    context_len: int

    @classmethod
    def of(cls, model: HfModel, rollout: SharedRolloutConfig) -> Bounds:
        """Return the limits of a service."""
        return cls(model.sizes.vocab_size, rollout.context_len or model.context_len)


class ForwardBody(Branch):
    kind: Literal["forward"]
    sequences: list[SequenceBody] = Field(min_length=1, max_length=MAX_SEQUENCES)
    replay: Literal["named", "match"] = "named"  # as in `forward_backward`

    @model_validator(mode="after")
    def _has_tokens_alone(self) -> Self:
        for number, each in enumerate(self.sequences):
            _forbid(number, each, PER_TOKEN, "forward")
        return self


OPTIONS = ("clip_low", "clip_high", "dual_clip", "beta", "kl_coeff")


class ForwardBackwardBody(Branch):
    kind: Literal["forward_backward"]
    loss: Literal[
        "cross_entropy", "linear", "importance_sampling", "ppo", "cispo", "gspo", "dro",
        "stable_reinforce",
    ]  # fmt: skip
    sequences: list[SequenceBody] = Field(min_length=1, max_length=MAX_SEQUENCES)
    clip_low: Annotated[float, Strict(), Field(gt=0, le=1)] | None = None
    clip_high: Annotated[float, Strict(), Field(gt=0)] | None = None
    dual_clip: Annotated[float, Strict(), Field(gt=1)] | None = None
    beta: NotNegative | None = None
    kl_coeff: NotNegative | None = None
    all_logprobs: bool = False
    """Whether the result has the log-probs of all tokens, not only of those in the loss. Then there
    may also be no token in the loss; the gradients are 0."""
    replay: Literal["named", "match"] = "named"
    """`named`: sequences replay the routes of their `sample`, which must be kept. `match`: of their
    `sample` if it is kept and has their tokens, else of the newest kept sample that has; else the
    trainer's routers choose."""

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        named = LOSSES[self.loss]
        for name in OPTIONS:
            if getattr(self, name) is not None and name not in named.options:
                raise ValueError(f"{name} is not read by the loss {self.loss}; leave it out")
        high = ppo.CLIP_HIGH if self.clip_high is None else self.clip_high
        if self.dual_clip is not None and self.dual_clip <= 1 + high:
            raise ValueError(
                f"dual_clip is {self.dual_clip:g}, expected above 1 + clip_high = {1 + high:g}"
            )
        other = ("weights",) if named.is_ratio else ("advantages", "logprobs")
        other = other if self.loss == "gspo" else (*other, "ratio_mask")
        for number, each in enumerate(self.sequences):
            _forbid(number, each, other, self.loss)
            if named.is_ratio and (each.advantages is None or each.logprobs is None):
                raise ValueError(
                    f"sequence {number}: {self.loss} needs advantages and logprobs; give both"
                )
        is_empty = not any(any(factors_of(each)[1:]) for each in self.sequences)
        if is_empty and not self.all_logprobs:
            raise ValueError("no token has a weight or an advantage; there is nothing to train on")
        return self

    def options(self) -> LossOptions:
        """Return the options of the loss; those that the request leaves out have their defaults."""
        given = self.model_dump(include=set(OPTIONS), exclude_none=True)
        own = {name: given.pop(name) for name in ("beta", "kl_coeff") if name in given}
        return LossOptions(AlgorithmConfig(**given), **own)


class OptimStepBody(Branch):
    kind: Literal["optim_step"]
    lr: Annotated[float, Strict(), Field(ge=0, le=1e3)] | None = None
    """Replaces the recipe's learning rate in this step; None keeps it. So do the others."""
    beta1: Share | None = None
    beta2: Share | None = None
    eps: Annotated[float, Strict(), Field(ge=1e-37, le=1)] | None = None
    weight_decay: NotNegative | None = None
    clip_grad: NotNegative | None = None
    """The largest norm of the gradients; 0 does not clip."""

    def settings(self) -> AdamStep:
        """Return the settings of the step."""
        return AdamStep(**self.model_dump(exclude={"kind"}))


class DropGradientsBody(Branch):
    kind: Literal["drop_gradients"]
    reason: Annotated[str, Field(max_length=1000)] | None = None
    """With a reason, the operation fails with it once the gradients are dropped."""


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
    sampler: Name | Literal["@base"] | None = None
    """The saved sampler whose weights sample; `@base` is the base model without an adapter. None takes
    the present weights."""
    prompt_logprobs: bool = False
    """Whether the result has the log-probs of the prompts' tokens, at temperature 1."""
    top_prompt_logprobs: Annotated[int, Strict(), Field(ge=0, le=MAX_TOP)] = 0
    """How many of the likeliest tokens the result has for each token of a prompt."""

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
    name: Name | None = None
    """The name of the saved state; None for one of the checkpoints, of which the newest are kept."""
    overwrite: bool = False
    """Whether a saved state of this name may be replaced."""


class SaveSamplerBody(Branch):
    kind: Literal["save_sampler"]
    name: Name
    overwrite: bool = False
    """Whether a sampler of this name may be replaced."""


class LoadBody(Branch):
    kind: Literal["load"]
    version: Annotated[int, Strict(), Field(ge=0, lt=1 << 31)] | None = None
    """The version of a checkpoint of this session, as `save` returned it."""
    name: Name | None = None
    """The name of a saved state of this session."""
    folder: Annotated[str, Field(min_length=1, max_length=4096, pattern="^/")] | None = None
    """The folder of a saved state or sampler, which may be another session's."""
    optimizer: bool = True
    """Whether Adam's state is loaded too. Otherwise Adam and its learning-rate schedule restart."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        given = [key for key in ("version", "name", "folder") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected one of version, name and folder, got {', '.join(given) or 'none of them'}"
            )
        return self


Body = (
    ForwardBody
    | ForwardBackwardBody
    | OptimStepBody
    | DropGradientsBody
    | SampleBody
    | SaveBody
    | SaveSamplerBody
    | LoadBody
)
KINDS: dict[str, type[Body]] = {
    "forward_backward": ForwardBackwardBody,
    "optim_step": OptimStepBody,
    "drop_gradients": DropGradientsBody,
    "sample": SampleBody,
    "forward": ForwardBody,
    "save": SaveBody,
    "save_sampler": SaveSamplerBody,
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
    for number, each in enumerate(getattr(body, "sequences", ())):
        if each.targets is not None:
            _check_vocabulary(f"{kind}: targets of sequence {number}", each.targets, bounds)
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


def _lengths(body: Body) -> list[tuple[Sequence[int], int]]:
    """Return each list of tokens in a body, with the number of tokens that may be generated after
    it."""
    if isinstance(body, SampleBody):
        return [(prompt, body.max_tokens) for prompt in body.prompts]
    if isinstance(body, (ForwardBody, ForwardBackwardBody)):
        return [(each.tokens, 0) for each in body.sequences]
    return []


def _check_vocabulary(what: str, tokens: Sequence[int], bounds: Bounds) -> None:
    if (largest := max(tokens)) >= bounds.vocab_size:
        raise InputError(
            f"{what}: token {largest} is not below {bounds.vocab_size}, the vocabulary"
        )


def _check_tokens(what: str, tokens: Sequence[int], more: int, bounds: Bounds) -> None:
    _check_vocabulary(what, tokens, bounds)
    if len(tokens) + more > bounds.context_len:
        answer = f" and {more} of an answer" if more else ""
        raise InputError(
            f"{what}: {len(tokens)} tokens{answer} are more than the context of {bounds.context_len}"
        )


def _forbid(number: int, given: SequenceBody, names: Sequence[str], reader: str) -> None:
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"sequence {number}: {name} is not read by {reader}; leave it out")
