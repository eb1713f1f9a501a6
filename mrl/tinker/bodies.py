"""The JSON bodies of the API's requests. A field that is not listed is refused by name, so that nothing
that a newer client asks for is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from mrl.config.explain import first_problem
from mrl.service.sessions.sequence import TokenId
from mrl.tinker.data import DTYPES, MAX_INPUTS, BadDatum, Pass, make_datum
from mrl.web.limits import Refused

Short = Annotated[str, Strict(), Field(max_length=200)]
Text = Annotated[str, Strict(), Field(max_length=10_000)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
Sequence = Annotated[int, Strict(), Field(ge=0, lt=1 << 62)]
"""A number that a client gives to a request, so that a repeated request is recognized."""
Name = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
"""The name of a checkpoint."""
Metadata = Annotated[dict[Short, Any], Field(max_length=64)] | None
LEAST_TTL_S, MOST_TTL_S = 3600, 10 * 366 * 86400
Seconds = Annotated[int, Strict(), Field(ge=LEAST_TTL_S, le=MOST_TTL_S)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: Any = None
    """The SDK's name of the request; the address says the same."""


class CreateSession(Body):
    tags: Annotated[list[Text], Field(max_length=64)] = []
    user_metadata: Metadata = None
    sdk_version: Short = ""
    project_id: Short | None = None
    display_name: Text | None = None


class Heartbeat(Body):
    session_id: Short


class Finish(Body):
    reason: dict[Short, Text] = {"type": "success"}
    detail: Text | None = None


class Lora(Body):
    rank: Annotated[int, Strict(), Field(ge=1, le=1 << 16)]
    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 53)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(BaseModel):
    """Which optimizer a model has; others than `adamw` are refused by `mrl.tinker.models`."""

    model_config = ConfigDict(extra="allow")

    type: Short = "adamw"


class CreateModel(Body):
    session_id: Short
    model_seq_id: Sequence
    base_model: Text
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class ModelId(Body):
    model_id: Short


class Adam(Body):
    learning_rate: Annotated[Number, Field(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Number, Field(ge=1e-37)] = 1e-12
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    grad_clip_norm: Number = 0.0


class OptimStep(Body):
    model_id: Short
    seq_id: Sequence | None = None
    adam_params: Adam | None = None
    optimizer_params: dict[Short, Any] | None = None


class SaveWeights(Body):
    model_id: Short
    path: Name | None = None
    seq_id: Sequence | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata = None


class SaveForSampler(Body):
    model_id: Short
    path: Name | None = None
    seq_id: Sequence | None = None
    sampling_session_seq_id: Sequence | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: Metadata = None


class SaveExternal(Body):
    model_id: Short
    path: Name
    seq_id: Sequence | None = None
    ttl_seconds: Seconds | None = None
    age_encryption_recipients: Annotated[list[Text], Field(max_length=10)] | None = None
    user_metadata: Metadata = None


class LoadWeights(Body):
    model_id: Short | None = None
    seq_id: Sequence | None = None
    session_id: Short | None = None
    model_seq_id: Sequence | None = None
    base_model: Text | None = None
    user_metadata: Metadata = None
    path: Text
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: Text | None = None


class CreateSampler(Body):
    session_id: Short
    sampling_session_seq_id: Sequence
    base_model: Text | None = None
    model_path: Text | None = None


class JoinSampler(Body):
    sampling_session_id: Short


class Chunk(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Short = "encoded_text"
    tokens: list[TokenId] = []


class ModelInput(Body):
    chunks: Annotated[list[Chunk], Field(max_length=1 << 16)]

    def ints(self, what: str) -> list[int]:
        """Return the tokens. Raises BadDatum, in whose message `what` is the input, for images and
        sound."""
        if others := [each.type for each in self.chunks if each.type != "encoded_text"]:
            raise BadDatum(f"{what} has {others[0]}; this server takes tokens only")
        return [token for each in self.chunks for token in each.tokens]


class SamplingParams(Body):
    max_tokens: Annotated[int, Strict(), Field(ge=1, lt=1 << 31)] | None = None
    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 53)] | None = None
    stop: str | list[TokenId] | list[str] | None = None
    temperature: Number = 1.0
    top_k: Annotated[int, Strict()] = -1
    top_p: Number = 1.0


class Sample(Body):
    num_samples: Annotated[int, Strict(), Field(ge=1, le=4096)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_session_id: Short | None = None
    seq_id: Sequence | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Annotated[int, Strict(), Field(ge=1)] | None = None
    record_stability_info: bool | None = None


class Tensor(Body):
    data: list[Number]
    dtype: Literal["float32", "int64"]
    shape: list[Count] | None = None
    sparse_crow_indices: Any = None
    sparse_col_indices: Any = None


class JsonDatum(Body):
    model_input: ModelInput
    loss_fn_inputs: Annotated[dict[Short, Tensor], Field(max_length=MAX_INPUTS)]


class PassInput(Body):
    data: Annotated[list[JsonDatum], Field(max_length=4096)]
    loss_fn: Short
    loss_fn_config: Annotated[dict[Short, Number | Short], Field(max_length=32)] | None = None


class JsonPass(Body):
    """The JSON form of forward_backward and forward, which older clients send."""

    model_id: Short
    seq_id: Sequence | None = None
    forward_backward_input: PassInput | None = None
    forward_input: PassInput | None = None

    def as_pass(self, *, forward_only: bool) -> Pass:
        """Return the request in the form in which it is carried out. Raises BadDatum."""
        given = self.forward_input if forward_only else self.forward_backward_input
        if given is None:
            raise BadDatum(
                f"{'forward_input' if forward_only else 'forward_backward_input'} is missing"
            )
        data = []
        for number, each in enumerate(given.data):
            inputs = {}
            for name, tensor in each.loss_fn_inputs.items():
                if tensor.sparse_crow_indices is not None:
                    raise BadDatum(f"datum {number}: {name} is sparse; send it dense")
                try:
                    with np.errstate(over="ignore"):  # `make_datum` refuses infinities
                        values = np.array(tensor.data, DTYPES[tensor.dtype])
                except OverflowError:
                    raise BadDatum(
                        f"datum {number}: {name} is int64 and has a number of more than 64 bits"
                    ) from None
                if tensor.dtype == "int64" and (values != np.array(tensor.data)).any():
                    raise BadDatum(
                        f"datum {number}: {name} is int64 and has a number with a fraction"
                    )
                shape = tensor.shape or [len(values)]
                if int(np.prod(shape)) != len(values) or len(shape) > 2:
                    raise BadDatum(
                        f"datum {number}: {name} has {len(values)} numbers and the shape {shape}"
                    )
                inputs[name] = values.reshape(shape)
            tokens = each.model_input.ints(f"datum {number}: model_input")
            data.append(make_datum(number, tokens, inputs))
        return Pass(
            self.model_id,
            self.seq_id or 0,
            given.loss_fn,
            data,
            given.loss_fn_config or {},
            forward_only,
        )


class Retrieve(Body):
    request_id: Short
    allow_metadata_only: bool = False


class Cancel(Body):
    request_id: Short


class WeightsInfo(Body):
    tinker_path: Text


class Ttl(Body):
    ttl_seconds: Seconds | None = None


B = TypeVar("B", bound=BaseModel)


def read(kind: type[B], given: Any) -> B:
    """Return the body of a request. Raises Refused with the first problem."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise Refused(422, first_problem(error)) from None
