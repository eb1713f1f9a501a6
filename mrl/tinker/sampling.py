"""Samplers, and the requests to sample from them. A sampler is a saved adapter of a model, or the base
model."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path
from typing import Any

from mrl.errors import DiskFailed, InputError
from mrl.service.registry import NoTenant, Registry
from mrl.service.sessions.bodies import BASE, MAX_TOP
from mrl.service.sessions.saved import folder_of
from mrl.system.disk import refusal
from mrl.tinker import bodies, paths
from mrl.tinker.backend import UNFINISHED, Backend, Row
from mrl.tinker.checkpoints import COPIED, Checkpoints, copy_name
from mrl.tinker.data import BadDatum
from mrl.web.limits import NotYet, Refused

OPEN_S = 60.0
"""How long a session of the service may take to open before it gets a copy, in seconds."""
COPY_S = 60.0
"""How long a request waits for another one that copies the same checkpoint, in seconds."""
TRIES = 2
"""How often a request to sample is posted, if its session is closed just then."""
Answer = dict[str, Any]


class Samplers:
    """Creates samplers and posts requests to sample. Every method takes the user that owns them."""

    def __init__(self, backend: Backend, checkpoints: Checkpoints, lora: Any) -> None:
        """`lora` returns the adapter of a model, as `Models.lora` does."""
        self._backend, self._ledger = backend, backend.ledger
        self._checkpoints, self._lora = checkpoints, lora
        self._copying = set[Path]()
        """The folders into which a checkpoint is being copied."""

    def create(self, owner: str, body: bodies.CreateSampler) -> Answer:
        """Create a sampler of a saved adapter or of the base model."""
        self._backend.session(owner, body.session_id)
        sampler = paths.sampler_id(body.session_id, body.sampling_session_seq_id)
        if body.base_model is not None:
            self._backend.check_base(body.base_model)
        if body.model_path is None:
            if body.base_model is None:
                raise Refused(400, "give base_model or model_path")
            tenant = self._host(owner, self._smallest(), body.session_id)
            about = {"tenant": tenant, "name": BASE, "base": body.base_model}
            about |= {"model": None, "saved": None}
        else:
            about = self._saved(owner, body.model_path, body.session_id)
        self.note(owner, body.session_id, sampler, path=body.model_path, **about)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def note(self, owner: str, session: str, sampler: str, **more: str | None) -> None:
        """Record a sampler. `more`: the name of its `base` model, the `model` that was saved, the
        `path` under which it was and the id of the request by which it was `saved` (None for the base
        model), the `tenant`, which is the session of the service that samples, and the `name` of the
        adapter in it."""
        known = self._ledger.add(
            "samplers",
            id=sampler,
            session=session,
            owner=owner,
            clones=0,
            created=time.time(),
            **more,
        )
        if known is not None and known["path"] != more["path"]:
            raise Refused(
                400, f"sampler {sampler} was created before from {known['path'] or known['base']}"
            )

    def _saved(self, owner: str, path: str, session: str) -> dict[str, str | None]:
        """Return what `note` records of a sampler that samples from a saved adapter, other than its
        path. `session`: the client's session."""
        parsed, saved = paths.parse(path), self._checkpoints.require(owner, path)
        model = self._backend.owned("models", owner, parsed.run)
        about = {"base": model["base"], "model": model["id"], "saved": saved["request"]}
        tenant = self._backend.tenant(model["tenant"])
        is_open = tenant is not None and tenant.state in UNFINISHED
        if is_open and parsed.kind == "sampler":
            return {**about, "tenant": model["tenant"], "name": parsed.name}
        lora = bodies.Lora(
            rank=model["rank"], train_attn=bool(model["attn"]), train_mlp=bool(model["mlp"])
        )
        name = copy_name(saved)
        where = model["tenant"] if is_open else self._host(owner, lora, session)
        self._copy(Path(saved["folder"]), where, name)
        return {**about, "tenant": where, "name": name}

    def _copy(self, folder: Path, tenant: str, name: str) -> None:
        """Copy a checkpoint to the samplers of a session of the service, unless it is there. The
        session is opened first, because it takes only an empty run folder; until then NotYet is
        raised."""
        if not self._backend.is_open(self._backend.active(tenant)):
            raise NotYet("the sampler is being opened; try again", OPEN_S)
        if self._backend.saved(tenant, "sampler", name) is not None:
            return
        target = folder_of(self._backend.run_folder(tenant), "samplers", name)
        with self._backend.making:
            if target in self._copying:
                raise NotYet("the sampler is being copied; try again", COPY_S)
            self._copying.add(target)
        try:
            partial = target.with_name(f".{name}.new")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(folder, partial / folder.name)
            if not target.exists():
                partial.rename(target)
        except OSError as error:
            if text := refusal(error, target):
                raise DiskFailed(text) from None
            why = " ".join(str(error).split())[:300]
            raise Refused(404, f"the checkpoint was removed, or cannot be read: {why}") from None
        finally:
            self._copying.discard(target)

    def _reopened(self, owner: str, row: Row) -> Row:
        """Return a sampler whose session of the service takes operations: if that was closed, paused or
        removed, another one samples in its place from now on, from the checkpoint."""
        tenant = self._backend.tenant(row["tenant"])
        if tenant is not None and tenant.state in UNFINISHED:
            if not _is_copy(row):
                self._require_same(row)
            return row
        if row["path"] is None:
            host = self._host(owner, self._smallest(), row["session"])
            moved: dict[str, str | None] = {"tenant": host, "name": BASE}
        else:
            self._require_same(row)
            about = self._saved(owner, row["path"], row["session"])
            self._require_same(row)  # it was not replaced meanwhile
            moved = {"tenant": about["tenant"], "name": about["name"]}
        self._ledger.set("samplers", row["id"], **moved)
        return {**row, **moved}

    def _require_same(self, row: Row) -> None:
        """Raise Refused unless the path of a sampler still names the checkpoint that the sampler was
        created from."""
        if row["saved"] is None or self._checkpoints.is_of(row["path"], row["saved"]):
            return
        raise Refused(
            404,
            f"the checkpoint {row['path']} that this sampler was created from was removed or replaced; "
            "create a sampling client of one that is there",
        )

    def _smallest(self) -> bodies.Lora:
        """Return the smallest adapter that the service allows, for a session that samples from the
        base model alone."""
        small = bodies.Lora(rank=1, train_mlp=False)
        try:
            self._lora(small)
        except Refused:  # it allows adapters of MLPs alone
            return bodies.Lora(rank=1)
        return small

    def _host(self, owner: str, lora: bodies.Lora, session: str) -> str:
        """Return a session of the service that is never trained, and only samples for a user: from the
        base model, and from adapters of models that are closed. It keeps its place as long as the
        client's session `session` has not ended, even if that makes no sampler of it."""
        shape = f"{owner}/{lora.rank}/{lora.train_attn}/{lora.train_mlp}"
        name = f"tk-host-{hashlib.sha256(shape.encode()).hexdigest()[:24]}"
        with self._backend.making:
            number, tenant = 0, None
            # A name of a removed session is not free: its run folder is that session's.
            while not _is_free(self._backend.registry, f"{name}-{number}"):
                tenant = self._backend.tenant(f"{name}-{number}")
                if tenant is not None and tenant.state in UNFINISHED:
                    break
                number, tenant = number + 1, None
            host = f"{name}-{number}"
            # Before it is added, so that it gives its place even if the service is killed now.
            self._ledger.add("hosts", tenant=host, created=time.time())
            self._ledger.set("hosts", host, session=session)
            try:
                if tenant is None:
                    tenant = self._backend.add_tenant(host, self._lora(lora), 0)
            except InputError as error:
                raise Refused(400, str(error)) from None
            self._ledger.set("hosts", host, sequence=tenant.sequence)
            return host

    def join(self, owner: str, body: bodies.JoinSampler) -> Answer:
        """Return a number for one more client of a sampler."""
        self._backend.owned("samplers", owner, body.sampling_session_id)
        counter = self._ledger.count(body.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": counter}

    def info(self, owner: str, sampler: str) -> Answer:
        """Return what a sampler samples from."""
        row = self._backend.owned("samplers", owner, sampler)
        return {
            "sampler_id": row["id"],
            "base_model": row["base"],
            "model_path": row["path"],
        }

    def sample(self, owner: str, body: bodies.Sample) -> Answer:
        """Sample answers to a prompt; return the request's id and the ids of the answers."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise Refused(
                422, "give sampling_session_id and seq_id; create_sampling_session makes one"
            )
        row = self._backend.owned("samplers", owner, body.sampling_session_id)
        self._backend.session_seen(row["session"])
        try:
            tokens = body.prompt.ints("the prompt")
        except BadDatum as error:
            raise Refused(400, str(error)) from None
        request = f"{row['id']}:{body.seq_id}"
        about = {
            "n": body.num_samples,
            "prompt_logprobs": bool(body.prompt_logprobs),
            "last_n": body.prompt_logprobs_last_n,
            "top": body.topk_prompt_logprobs,
        }
        operation = self._post(owner, row, body, tokens, request, about)
        names = [f"{operation}/0/{k}" for k in range(body.num_samples)]
        return {"request_id": request, "sample_sequence_ids": names}

    def _post(
        self,
        owner: str,
        row: Row,
        body: bodies.Sample,
        tokens: list[int],
        request: str,
        about: dict[str, Any],
    ) -> str:
        """Post a request to sample; return the operation's id."""
        # A request that was made before has its answer, whatever became of the checkpoint since.
        is_new = self._ledger.get("requests", request) is None
        for _ in range(TRIES):
            row = self._reopened(owner, row) if is_new else row
            asked = self._operation(row, body, tokens)
            try:
                posted = self._backend.post(owner, request, "sample", row["tenant"], asked, about)
            except Refused as error:
                if error.status != 410:  # otherwise it was closed in this moment
                    raise
            else:
                try:
                    if is_new and not _is_copy(row):
                        self._require_same(row)
                except Refused:
                    self._ledger.remove("requests", request)
                    raise
                # What replaces the checkpoint from now on is saved after this operation.
                return posted
        raise Refused(503, "the sampler is being opened again; try again")

    def _operation(self, row: Row, body: bodies.Sample, tokens: list[int]) -> dict[str, Any]:
        params = body.sampling_params
        for name, is_asked in (
            ("topk_sample_logprobs", body.topk_sample_logprobs),
            ("target_prompt_logprobs", body.target_prompt_logprobs is not None),
            ("prompt_alt_tokens_k", body.prompt_alt_tokens_k),
        ):
            if is_asked:
                raise Refused(400, f"{name}: this service does not compute it; leave it out")
        if body.topk_prompt_logprobs > MAX_TOP:
            raise Refused(
                400, f"topk_prompt_logprobs is {body.topk_prompt_logprobs}, at most {MAX_TOP}"
            )
        last = body.prompt_logprobs_last_n
        if last is not None and (not body.prompt_logprobs or last >= len(tokens)):
            raise Refused(
                400,
                f"prompt_logprobs_last_n is {last}; expected 1 to {len(tokens) - 1}, with "
                "prompt_logprobs",
            )
        room = self._backend.bounds.context_len - len(tokens)
        max_tokens = max(1, room) if params.max_tokens is None else params.max_tokens
        asked: dict[str, Any] = {
            "kind": "sample",
            "prompts": [tokens],
            "n": body.num_samples,
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "seed": params.seed,
            "sampler": row["name"],
        }
        if body.prompt_logprobs:
            asked["prompt_logprobs"] = True
        if body.topk_prompt_logprobs:
            asked["top_prompt_logprobs"] = body.topk_prompt_logprobs
        match params.stop:
            case None:
                pass
            case str(text):
                asked["stop"] = [text]
            case []:
                asked["min_tokens"] = max_tokens  # no token ends the answer, not even EOS
            case [int(), *_] as ids:
                asked["stop_token_ids"] = ids
            case texts:
                asked["stop"] = texts
        return asked


def _is_copy(row: Row) -> bool:
    """Whether a sampler samples from a copy of its checkpoint, which stays what it is, whatever the
    path of the checkpoint names now."""
    return row["name"].startswith(COPIED)


def _is_free(registry: Registry, name: str) -> bool:
    """Whether no tenant of the service ever had this name."""
    try:
        registry.get(name)
    except NoTenant:
        return True
    return False
