"""What a client does with a model: passes, optimizer steps, saving and loading. Each request becomes an
operation of the session behind the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mrl.tinker import bodies, paths
from mrl.tinker.backend import EXPORTED, Backend, Row, saved_name
from mrl.tinker.checkpoints import COPIED, EPHEMERAL, Checkpoints
from mrl.tinker.data import Datum, Pass
from mrl.tinker.sampling import Samplers
from mrl.web.limits import Refused

INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
    "stable_reinforce": ("logprobs", "advantages"),
}
"""The inputs of each loss beside `target_tokens`, by the API's names."""
OPTIONAL = frozenset({"weights", "sequence_ratio_mask"})
FIELDS = {"sequence_ratio_mask": "ratio_mask"}
"""Names of inputs in an operation, where they differ from the API's."""
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ppo": (LOW, HIGH),
    "cispo": (LOW, HIGH),
    "gspo": (LOW, HIGH),
    "dro": ("beta",),
    "stable_reinforce": ("kl_coeff",),
}
"""The keys that loss_fn_config may have, by loss."""
OWN_NAMES = (EPHEMERAL, EXPORTED, COPIED)
"""Prefixes of names of samplers that clients cannot use."""
MAX_SAMPLE_CHARS = 100
"""Maximum length of the id of a sample. The ids of this service are shorter."""
DEFAULT_CLIP = {LOW: 0.8, HIGH: 1.2}
Answer = dict[str, Any]


class Training:
    """Posts the operations of models. Every method takes the user that owns the model, and returns the
    request's id."""

    def __init__(self, backend: Backend, checkpoints: Checkpoints, samplers: Samplers) -> None:
        self._backend, self._checkpoints, self._samplers = backend, checkpoints, samplers

    def refused_pass(self, owner: str, model_id: str, seq_id: Any) -> str:
        """Record that a forward_backward was refused. Return the text to add to the reason."""
        model = self._backend.ledger.get("models", model_id)
        if model is None or model["owner"] != owner:
            return ""
        return self._backend.note_refused(model, f"forward_backward {model_id}:{str(seq_id)[:20]}")

    def run_pass(self, owner: str, given: Pass) -> Answer:
        """Compute log-probs and, unless `forward_only`, add the gradients of a loss."""
        model = self._model(owner, given.model_id)
        if given.loss not in INPUTS:
            hint = "; create_custom_loss is not uploaded here, so leave loss_fn to the SDK"
            raise Refused(
                400,
                f"loss_fn is {given.loss[:80]!r}; expected one of {', '.join(INPUTS)}"
                f"{hint * (given.loss == 'custom')}",
            )
        if given.forward_only and given.loss != "cross_entropy":
            raise Refused(
                400,
                f"forward has the loss cross_entropy here, got {given.loss}; use forward_backward",
            )
        about: dict[str, Any] = {}
        replays = self._backend.config.moe.capture_routes
        replay = "match" if replays else "named"
        sequences = [
            _sequence(n, datum, given, replays=replays) for n, datum in enumerate(given.data)
        ]
        if given.forward_only:
            weights = [each.inputs.get("weights") for each in given.data]
            about["weights"] = [None if w is None else w.tolist() for w in weights]
            kind = "forward"
            body = {"kind": kind, "sequences": sequences, "replay": replay}
        else:
            kind = "forward_backward"
            body = {
                "kind": kind,
                "loss": given.loss,
                "sequences": sequences,
                "all_logprobs": True,
                "replay": replay,
                **_options(given),
            }
        return self._post(owner, model, given.seq_id, kind, body, about)

    def optim_step(self, owner: str, body: bodies.OptimStep) -> Answer:
        """Take a step of Adam."""
        model = self._model(owner, body.model_id)
        if body.optimizer_params is not None or body.adam_params is None:
            raise Refused(400, "optim_step takes AdamParams; this service has no other optimizer")
        adam = body.adam_params
        step = {
            "kind": "optim_step",
            "lr": adam.learning_rate,
            "beta1": adam.beta1,
            "beta2": adam.beta2,
            "eps": adam.eps,
            "weight_decay": adam.weight_decay,
            "clip_grad": max(0.0, adam.grad_clip_norm),
        }
        return self._post(owner, model, body.seq_id, "optim_step", step)

    def save(self, owner: str, body: bodies.SaveWeights) -> Answer:
        """Write a checkpoint from which training can go on."""
        path = paths.Path(body.model_id, "training", body.path or f"{body.seq_id or 0:06d}")
        return self._save(owner, path, body, overwrite=body.overwrite)

    def save_for_sampler(self, owner: str, body: bodies.SaveForSampler) -> Answer:
        """Write the adapter, and make a sampler of it if it has no name."""
        if body.path is not None and body.path.startswith(OWN_NAMES):
            raise Refused(
                400, f"path begins with one of {', '.join(OWN_NAMES)}; choose another name"
            )
        if body.path is not None:
            return self._save(owner, paths.Path(body.model_id, "sampler", body.path), body)
        if body.sampling_session_seq_id is None:
            raise Refused(422, "give path, or sampling_session_seq_id for a sampler without a name")
        name = f"{EPHEMERAL}{body.seq_id or 0}"
        path = paths.Path(body.model_id, "sampler", name)
        model = self._model(owner, body.model_id)
        sampler = paths.sampler_id(model["session"], body.sampling_session_seq_id)
        answer = self._save(owner, path, body, sampler=sampler)
        self._samplers.note(
            owner,
            model["session"],
            sampler,
            base=model["base"],
            model=model["id"],
            name=name,
            path=str(path),
            tenant=model["tenant"],
            saved=answer["request_id"],
        )
        return answer

    def save_external(self, owner: str, body: bodies.SaveExternal) -> Answer:
        """Write the adapter, to be downloaded as a PEFT folder."""
        if body.age_encryption_recipients:
            raise Refused(
                400,
                "age_encryption_recipients: files are not encrypted here; leave it out, as they do not "
                "leave this machine",
            )
        return self._save(owner, paths.Path(body.model_id, "external", body.path), body)

    def load(self, owner: str, body: bodies.LoadWeights) -> Answer:
        """Replace the weights of a model by those of a checkpoint."""
        model = self._backend.owned("models", owner, body.model_id or "")
        if body.weights_access_token is not None:
            raise Refused(
                400, "weights_access_token: checkpoints of other users cannot be read here"
            )
        folder = self._checkpoints.folder(owner, body.path)
        load = {"kind": "load", "folder": str(folder), "optimizer": body.optimizer}
        about = {"path": body.path, "model": model["id"]}
        return self._post(owner, model, body.seq_id, "load_weights", load, about)

    def _save(
        self,
        owner: str,
        path: paths.Path,
        body: bodies.SaveWeights | bodies.SaveForSampler | bodies.SaveExternal,
        *,
        overwrite: bool = False,
        sampler: str = "",
    ) -> Answer:
        model = self._model(owner, path.run)
        request = _request(model, body.seq_id)
        is_new = self._backend.ledger.get("requests", request) is None
        if is_new and not overwrite and self._checkpoints.exists(path):
            raise Refused(400, f"{path} exists already; give another name, or overwrite it")
        save = {
            "kind": "save" if path.kind == "training" else "save_sampler",
            "name": saved_name(path.kind, path.name),
            "overwrite": overwrite,
        }
        about = {"path": str(path), "sampler": sampler, "kind": path.kind}
        if not is_new:
            return self._post(owner, model, body.seq_id, "save_weights", save, about)
        # Before it is posted, so that it is known even if the service is killed now.
        before = self._checkpoints.note(path, owner, request, body.ttl_seconds, body.user_metadata)
        try:
            return self._post(owner, model, body.seq_id, "save_weights", save, about)
        except Refused:
            if self._backend.ledger.get("requests", request) is None:
                self._checkpoints.put_back(path, before)
            raise

    def _model(self, owner: str, key: str) -> Row:
        """Return a model whose operations are all done or under way."""
        model = self._backend.owned("models", owner, key)
        self._backend.session_seen(model["session"])
        self._backend.check_whole(model)
        return model

    def _post(
        self,
        owner: str,
        model: Row,
        seq_id: int | None,
        kind: str,
        body: dict[str, Any],
        about: dict[str, Any] | None = None,
    ) -> Answer:
        request = _request(model, seq_id)
        self._backend.post(owner, request, kind, model["tenant"], body, about)
        return {"request_id": request, "model_id": model["id"]}


def _request(model: Row, seq_id: int | None) -> str:
    if not seq_id or seq_id < 0:
        raise Refused(
            422, f"seq_id is {seq_id or 'missing'}; a model's requests are numbered from 1"
        )
    return f"{model['id']}:{seq_id}"


def _sequence(number: int, datum: Datum, given: Pass, *, replays: bool) -> dict[str, Any]:
    """Return a datum as a sequence of an operation.

    In the API, number i belongs to the target that follows token i. In an operation, number t belongs
    to token t, so that the last target becomes a token of its own and all lists move by one.
    """
    known = INPUTS[given.loss]
    targets = datum.inputs["target_tokens"].tolist()
    for name in datum.inputs:
        if name not in (*known, "target_tokens"):
            raise Refused(
                400,
                f"datum {number}: {given.loss} does not read {name}; it reads target_tokens, "
                f"{', '.join(known)}",
            )
    tokens = [*datum.tokens, targets[-1]]
    sequence: dict[str, Any] = {"tokens": tokens}
    if (moved := [tokens[0], *targets]) != tokens:
        sequence["targets"] = moved
    names = [span.sequence_id for span in datum.spans[-1:] if span.is_sampled]
    if replays and names and len(names[0]) <= MAX_SAMPLE_CHARS:
        sequence["sample"] = names[0]
    if given.forward_only:
        return sequence
    for name in known:
        if name in datum.inputs:
            values = np.asarray(datum.inputs[name], np.float32).tolist()
            sequence[FIELDS.get(name, name)] = [0.0, *values]
        elif name not in OPTIONAL:
            raise Refused(400, f"datum {number}: {given.loss} needs {name}, and it is missing")
    return sequence


def _options(given: Pass) -> dict[str, float]:
    """Return loss_fn_config as options of an operation."""
    known = OPTIONS.get(given.loss, ())
    for name, value in given.options.items():
        if name not in known:
            raise Refused(
                400,
                f"loss_fn_config: {given.loss} does not read {name[:80]}; it reads "
                f"{', '.join(known) or 'nothing'}",
            )
        if not isinstance(value, (int, float)) or not np.isfinite(value):
            raise Refused(400, f"loss_fn_config: {name} is {str(value)[:80]!r}, expected a number")
    values = {name: float(value) for name, value in given.options.items()}
    if not 0 <= values.get(LOW, 0.0) < 1:
        raise Refused(
            400, f"loss_fn_config: {LOW} is {values[LOW]:g}, expected 0 or more and below 1"
        )
    if values.get(HIGH, 2.0) <= 1:
        raise Refused(400, f"loss_fn_config: {HIGH} is {values[HIGH]:g}, expected above 1")
    if LOW not in known:
        return values
    values = {**({} if given.loss == "gspo" else DEFAULT_CLIP), **values}
    options = {}
    if LOW in values:
        options["clip_low"] = 1.0 - values[LOW]
    if HIGH in values:
        options["clip_high"] = values[HIGH] - 1.0
    return options
