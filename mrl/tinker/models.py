"""Clients' sessions, and the models that they train. Behind each model stands a session of the service
(`mrl.service.sessions`)."""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Any

from mrl.errors import InputError
from mrl.run import console
from mrl.tinker import bodies, paths
from mrl.tinker.backend import Backend, Row
from mrl.tinker.checkpoints import Checkpoints, as_time
from mrl.web.limits import Refused

ALPHA = 32.0
"""The scale of every adapter, as the API defines it."""
MLP_MODULES = frozenset({"gate_proj", "up_proj", "down_proj"})
UNEMBED = (
    "train_unembed, which is on by default, has no effect: the output layer has no adapter here"
)
MLP = (
    "train_mlp has no effect either: this service allows no adapters of MLPs and experts (its "
    "lora.targets and lora.experts)"
)
Answer = dict[str, Any]


class Models:
    """Creates sessions and models. The first argument of every method is the user that owns them."""

    def __init__(self, backend: Backend, checkpoints: Checkpoints) -> None:
        self._backend, self._ledger, self._checkpoints = backend, backend.ledger, checkpoints

    def create_session(self, owner: str, body: bodies.CreateSession) -> Answer:
        """Return a new session, with a warning about what this service does not train."""
        session = str(uuid.uuid4())
        self._ledger.add(
            "sessions",
            id=session,
            owner=owner,
            name=body.display_name,
            metadata=body.user_metadata,
            created=time.time(),
            finished="",
        )
        return {
            "type": "create_session",
            "session_id": session,
            "info_message": None,
            "warning_message": "; ".join(self._limits()),
            "error_message": None,
        }

    def _limits(self) -> list[str]:
        return [UNEMBED] if self._has_mlp() else [UNEMBED, MLP]

    def heartbeat(self, owner: str, body: bodies.Heartbeat) -> Answer:
        """Record that a client is alive."""
        self._backend.session(owner, body.session_id)
        return {"type": "session_heartbeat"}

    def finish(self, owner: str, session: str, body: bodies.Finish) -> None:
        """End a session: its models are saved and take no more requests."""
        row = self._backend.owned("sessions", owner, session)
        if not row["finished"]:
            why = body.reason.get("type") or "success"
            self._ledger.set("sessions", session, finished=why)
            for model in self._ledger.find("models", session=session):
                self._backend.end(model["tenant"])

    def create(self, owner: str, body: bodies.CreateModel) -> Answer:
        """Create a model with a new adapter; return the request's id."""
        if body.lora_config is None:
            raise Refused(
                400, "lora_config is missing: this service trains adapters, and not whole models"
            )
        self._backend.check_base(body.base_model)
        check_optimizer(body.optimizer_config)
        model = paths.model_id(body.session_id, body.model_seq_id)
        return self._add(
            owner,
            body.session_id,
            body.model_seq_id,
            body.lora_config,
            body.base_model,
            body.user_metadata,
            lambda name: self._backend.note(owner, f"{model}:0", "create_model", name),
        )

    def load_new(self, owner: str, body: bodies.LoadWeights) -> Answer:
        """Create a model from a checkpoint; return the request's id."""
        if body.session_id is None or body.model_seq_id is None:
            raise Refused(422, "give session_id and model_seq_id together")
        if body.base_model is not None:
            self._backend.check_base(body.base_model)
        check_optimizer(body.optimizer_config or bodies.Optimizer())
        saved = self._checkpoints.folder(owner, body.path)
        source = self._backend.owned("models", owner, paths.parse(body.path).run)
        lora = bodies.Lora(
            rank=source["rank"],
            train_attn=bool(source["attn"]),
            train_mlp=bool(source["mlp"]),
            train_unembed=bool(source["unembed"]),
        )
        model = paths.model_id(body.session_id, body.model_seq_id)
        load = {"kind": "load", "folder": str(saved), "optimizer": body.optimizer}
        about = {"path": body.path, "model": model}
        return self._add(
            owner,
            body.session_id,
            body.model_seq_id,
            lora,
            body.base_model or source["base"],
            body.user_metadata,
            lambda name: self._backend.post(owner, f"{model}:0", "load_weights", name, load, about),
        )

    def _add(
        self,
        owner: str,
        session: str,
        number: int,
        lora: bodies.Lora,
        base: str,
        metadata: Any,
        post: Any,
    ) -> Answer:
        """Add a model, unless it was added before, and call `post` with the name of the session behind
        it."""
        self._backend.session(owner, session)
        model, name = paths.model_id(session, number), paths.tenant_name(session, number)
        with self._backend.making:
            known = self._ledger.get("models", model)
            seed = lora.seed
            if seed is None:  # the same again if the request is repeated
                named = int(hashlib.sha256(model.encode()).hexdigest()[:7], 16)
                seed = named if known is None else known["seed"]
            # Before it is added, so that it gives its place even if the service is killed now.
            self._ledger.add("hosts", tenant=name, session=session, created=time.time())
            try:
                tenant = self._backend.add_tenant(
                    name,
                    self.lora(lora),
                    seed,
                    checkpoint={"save_every": self._backend.config.control.tinker_save_every},
                )
            except InputError as error:
                raise Refused(400, str(error)) from None
            with self._ledger.together():
                self._ledger.add(
                    "models",
                    id=model,
                    session=session,
                    owner=owner,
                    base=base,
                    tenant=name,
                    sequence=tenant.sequence,
                    rank=lora.rank,
                    seed=seed,
                    attn=lora.train_attn,
                    mlp=lora.train_mlp,
                    unembed=lora.train_unembed,
                    metadata=metadata,
                    created=time.time(),
                )
                self._ledger.remove("hosts", name)
            post(name)
        if lora.train_unembed:
            console.warning(f"model {model} of {owner}: {UNEMBED}")
        return {"request_id": f"{model}:0", "model_id": model}

    def lora(self, given: bodies.Lora) -> dict[str, Any]:
        """Return the adapter of a model as the section `lora` of a recipe. Raises Refused if it
        would have no module."""
        allowed = self._backend.config.lora
        if allowed.targets == "attention":
            attention: Any = "attention" if given.train_attn else []
            mlp: list[str] = []
        else:
            attention = [m for m in allowed.targets if m not in MLP_MODULES and given.train_attn]
            mlp = [m for m in allowed.targets if m in MLP_MODULES and given.train_mlp]
        kinds = [kind for kind in allowed.experts if kind != "none"]
        experts = kinds[0] if kinds and given.train_mlp else "none"
        targets = attention if isinstance(attention, str) else [*attention, *mlp]
        if not targets and experts == "none":
            raise Refused(
                400,
                "the adapter has no module: this service allows "
                f"lora.targets={allowed.targets} and lora.experts={list(allowed.experts)}, and no "
                "adapter of the output layer (train_unembed); set train_attn or train_mlp",
            )
        return {"rank": given.rank, "alpha": ALPHA, "targets": targets, "experts": experts}

    def _has_mlp(self) -> bool:
        allowed = self._backend.config.lora
        kinds = [kind for kind in allowed.experts if kind != "none"]
        return bool(kinds) or bool(MLP_MODULES & set(allowed.targets))

    def unload(self, owner: str, body: bodies.ModelId) -> Answer:
        """Save and close a model; return the request's id."""
        model = self._backend.owned("models", owner, body.model_id)
        self._backend.end(model["tenant"])
        request = f"{body.model_id}:unload"
        self._backend.note(owner, request, "unload_model", model["tenant"])
        return {"request_id": request, "model_id": body.model_id}

    def info(self, owner: str, body: bodies.ModelId) -> Answer:
        """Return what a model is."""
        model = self._backend.owned("models", owner, body.model_id)
        name = model["base"]
        arch = self._backend.model.architecture.model_type
        return {
            "type": "get_info",
            "model_id": model["id"],
            "model_name": name,
            "is_lora": True,
            "lora_rank": model["rank"],
            "optimizer_config": {"type": "adamw"},
            "model_data": {
                "arch": arch,
                "model_name": name,
                "tokenizer_id": self._backend.model_name,
            },
        }

    def training_run(self, model: Row) -> Answer:
        """Return a model as the SDK's TrainingRun."""
        last = self._ledger.newest("requests", tenant=model["tenant"]) or model
        saved = self._checkpoints.of_run(model["id"])
        newest = {
            kind: next((c for c in reversed(saved) if c["checkpoint_type"] == kind), None)
            for kind in ("training", "sampler")
        }
        return {
            "training_run_id": model["id"],
            "base_model": model["base"],
            "model_owner": model["owner"],
            "is_lora": True,
            "lora_rank": model["rank"],
            "last_request_time": as_time(last["created"]),
            "last_checkpoint": newest["training"],
            "last_sampler_checkpoint": newest["sampler"],
            "user_metadata": texts(model["metadata"]),
        }


def check_optimizer(given: bodies.Optimizer) -> None:
    """Raise Refused for another optimizer than Adam."""
    if given.type != "adamw":
        raise Refused(400, f"optimizer_config.type is {given.type!r}; this service has adamw")


def texts(metadata: Any) -> dict[str, str] | None:
    """Return metadata with its values as texts, as the SDK expects them."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
