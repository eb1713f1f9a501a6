"""The run of a session, from when the session is opened until it is paused or removed.

In a turn, the run carries out the `sample` operations at the front of its queue, and then the
operations behind them up to the next `sample`. `SessionSampler.engines` takes part in the rollout
phases of a colocated service, or in the exchange of a disaggregated one with its workers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from mrl.config import Recipe
from mrl.errors import InputError
from mrl.exchange.sharing import share_bytes
from mrl.learn.models import make_policy
from mrl.preflight.lora import check_lora
from mrl.preflight.resume import check_adapter, resume_step
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.service.consensus import SERVICE_FAULTS
from mrl.service.record import engine_name, name_of
from mrl.service.sessions.bodies import (
    KINDS,
    Body,
    ForwardBackwardBody,
    LoadBody,
    OptimStepBody,
    SampleBody,
)
from mrl.service.sessions.journal import Journal
from mrl.service.sessions.operations import Operations
from mrl.service.sessions.recipe import check_session
from mrl.service.sessions.records import SampleRecords
from mrl.service.sessions.samplers import Source
from mrl.service.sessions.samples import Samples
from mrl.service.sessions.sampling import SessionModel, SessionSampler, canary_prompts
from mrl.service.sessions.trainer import SessionTrainer
from mrl.service.shared import SharedResources
from mrl.service.tenant_run import TurnCost
from mrl.service.tokenizer import ServiceTokenizer
from mrl.system.heartbeat import beat, phase
from mrl.system.memory_error import out_of_memory
from parallel.hf_config import HfModel


class SessionRun:
    """Carries out the operations of one session. Every method is a collective; properties are
    not."""

    is_done = is_over = False
    """Always false, because a session has no last step."""

    def __init__(
        self,
        incarnation: str,
        weight: float,
        recipe: Recipe,
        shared: SharedResources[Any],
        operations: Operations | None,
        agree: Callable[[str], str],
    ) -> None:
        """Open the session at its newest checkpoint, or at version 0 if there is none.

        `incarnation`: the session's id (`Tenant.incarnation`). `operations`: the operations of all
        sessions; None on all ranks except rank 0. `agree` returns the failure text of the first
        rank that has one (`FailureConsensus.first`). Raises InputError if the session cannot start
        with this recipe, and RunFailed if the checkpoint cannot be read.
        """
        self.name, self._incarnation = (name := name_of(incarnation)), incarnation
        self.cost = TurnCost()
        self._shared, self._operations, self._agree = shared, operations, agree
        mesh = shared.mesh
        check_session(recipe)
        model = HfModel.read(recipe.model.path, recipe.model.architecture)
        adapter = check_lora(recipe, model)
        assert adapter is not None  # `check_tenant` refuses a recipe without an adapter
        native = recipe.model.model_copy(update={"transformer_impl": "local"})
        self._recipe = recipe = recipe.model_copy(update={"model": native})
        self.folder = RunFolder(recipe.output_dir)
        with ExitStack() as undo:
            undo.callback(self.folder.close)
            if mesh.rank == 0:
                self.folder.claim()  # before anything looks for a checkpoint
            check_adapter(self.folder, adapter)
            update = self.folder.check(recipe)
            step = resume_step(self.folder, console.warn_on(mesh.rank == 0))
            if mesh.rank == 0:
                self.folder.open(recipe, update, step or 0)
            self.policy = make_policy(
                recipe, model, mesh, adapter, trains=True, base=shared.base, name=name
            )
            undo.callback(self.policy.close)
            samples = Samples()
            self._trainer = SessionTrainer(recipe, mesh, self.folder, self.policy, samples)
            engines = shared.engines.make_sampling(
                SessionModel(
                    engine_name(incarnation),
                    weight,
                    recipe,
                    adapter,
                    canary_prompts(model.sizes.vocab_size, recipe.rollout),
                    self.policy,
                    self._trainer.samplers.in_place,
                )
            )
            self.sampler = SessionSampler(recipe, mesh, samples, engines)
            undo.callback(self.sampler.close)
            self._trainer.resume(step)
            undo.pop_all()
        self._records = SampleRecords(
            self.folder, ServiceTokenizer(model), recipe.rollout.temperature
        )
        if operations is not None:
            operations.begin(incarnation, self._trainer.version, Journal(self.folder.root))
        self.tokens_of_step = 0
        """Number of tokens in the `sample` operations of the next turn, as last reported by rank 0;
        0 if no operation waits."""
        self._source = Source(None, self.step, self.step)
        """The weights that sample in the current turn."""
        self._asked: dict[str, SampleBody] = {}
        """The `sample` operations of the current turn, by id."""
        self._turn: list[tuple[str, Body]] = []
        """The other operations of the current turn that are not carried out yet, with their ids."""

    @property
    def step(self) -> int:
        """The version of the session's weights."""
        return self._trainer.version

    @property
    def wants_turn(self) -> bool:
        """Whether an operation waits in the queue."""
        return self.tokens_of_step > 0

    @property
    def trains(self) -> bool:
        """Whether the current turn has operations for the trainer."""
        return bool(self._turn)

    def note_waiting(self, waiting_tokens: int) -> None:
        """Store the result of `Operations.waiting_tokens` on rank 0: the number of tokens in the
        next turn's `sample` operations; 0 if no operation waits."""
        self.tokens_of_step = waiting_tokens

    def begin(self) -> None:
        """Take the operations of the next turn from the queue."""
        said = b""
        if self._operations is not None:
            taken = self._operations.take(self._incarnation)
            bodies = [(each.id, each.body.model_dump(mode="json")) for each in taken]
            sampler = next((e.body.sampler for e in taken if isinstance(e.body, SampleBody)), None)
            version, failure = -1, ""
            try:
                version = self._trainer.samplers.version_of(sampler)
            except InputError as error:
                failure = str(error)
            said = json.dumps([bodies, sampler, version, failure]).encode()
        bodies, sampler, version, failure = json.loads(share_bytes(said)[0])
        turn: list[tuple[str, Body]] = [
            (name, KINDS[body["kind"]].model_validate(body)) for name, body in bodies
        ]
        asked = {
            name: (body, self._seed(name) if body.seed is None else body.seed)
            for name, body in turn
            if isinstance(body, SampleBody)
        }
        self._asked = {name: body for name, (body, _) in asked.items()}
        self._turn = [(name, body) for name, body in turn if name not in asked]
        if failure:  # there is no such sampler
            for name in asked:
                self._answer(name, None, failure)
            asked, self._asked = {}, {}
        self._source = self._trainer.samplers.source(sampler, version, self.step)
        self.sampler.begin(asked, self._source)

    def _seed(self, operation: str) -> int:
        """Return the seed of a `sample` operation whose body has no seed."""
        return self._recipe.seed * 1_000_003 + int(operation.partition("-")[2])

    def score(self) -> None:
        """Answer the `sample` operations of the current turn, once all of them are generated.
        Raises RunFailed if operations of this session have killed the engine too often."""
        if (found := self.sampler.finish()) is None:
            return
        results, failures = found
        for name in self._asked:
            self._answer(name, results.get(name), failures.get(name, ""))
        for name, result in results.items() if self._source.name is None else ():
            self._record(partial(self._records.add, self.step, self._asked[name], result))
        self.sampler.check_behaviour()

    @phase("train")
    def train(self) -> None:
        """Carry out and answer the operations of the current turn that are not `sample`, one after
        another."""
        self.cost.swap = self.policy.mount()
        start = time.perf_counter()
        while self._turn:
            name, body = self._turn.pop(0)
            beat()
            result, failure = self._carried_out(body)
            if failure:
                self._trainer.note_failure(name, body)
            if isinstance(body, (OptimStepBody, LoadBody)) and not failure:
                self._save_if_due(name, body, result)
            self._answer(name, result, failure)
            if isinstance(body, ForwardBackwardBody) and not failure:
                self._record(partial(self._records.train, self.step, body, result))
        self.cost.update_s = time.perf_counter() - start

    def _carried_out(self, body: Body) -> tuple[Any, str]:
        """Carry out an operation. Return its result, and the error of the first rank on which it
        failed. The error is empty if the operation succeeded on all ranks."""
        result, failure = None, ""
        try:
            result = self._trainer.run(body)
        except SERVICE_FAULTS:
            raise
        except (ValueError, RuntimeError, OSError) as error:
            if out_of_memory(error):
                raise
            failure = " ".join(str(error).split()) or type(error).__name__
        return result, self._agree(failure)

    def _save_if_due(self, name: str, body: Body, result: Any) -> None:
        """Save a checkpoint after every `checkpoint.save_every` optimizer steps and, unless that is 0,
        after each `load`, before the operation `name` is answered: one whose answer is known is not
        lost. Its result is in the journal before that, so that an operation whose effect is in a
        checkpoint is never repeated."""
        every = self._recipe.checkpoint.save_every
        if every and (isinstance(body, LoadBody) or self.step % every == 0):
            if self._operations is not None:
                self._operations.note_done(self._incarnation, name, result, self.step)
            self._trainer.save()

    def _record(self, write: Callable[[], None]) -> None:
        """On rank 0, call `write`, which writes samples for the page of the run. If it fails, mrl
        only warns, and the client is not affected."""
        if self._shared.mesh.rank == 0:
            try:
                write()
            except (OSError, InputError) as error:
                why = " ".join(str(error).split())
                console.warning(f"samples of {self.name} are not on its page: {why}")

    def _answer(self, name: str, result: Any, failure: str) -> None:
        if self._operations is not None:
            self._operations.answer(
                self._incarnation, name, result=result, error=failure, version=self.step
            )

    def leave(self) -> None:
        """Save the present version unless a checkpoint has it already, and close the run. Gradients
        that no optimizer step has used are dropped."""
        try:
            self.policy.mount()
            self._trainer.save()
        finally:
            self.close()

    def close(self) -> None:
        """Release everything without saving. Operations in the queue are lost. Harmless when
        repeated."""
        with ExitStack() as closing:  # all are closed, even if one raises
            closing.callback(self.folder.close)
            closing.callback(self.policy.close)
            closing.callback(self.sampler.close)
            closing.callback(self._trainer.checkpoints.rescue)
            if self._operations is not None:
                self._operations.end(self._incarnation)
