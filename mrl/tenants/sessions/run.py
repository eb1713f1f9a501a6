"""A session's run is open from the moment when it joins until it is paused or removed.

It has the parts of a `ColocatedRun`, and a turn of it is one of the queue of its operations: samples
first, then what trains, up to the next sample.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist

from mrl.config import Recipe
from mrl.config.adapter import Adapter
from mrl.errors import EngineGone, InputError, OutOfMemory, RankLost
from mrl.exchange.sharing import share_bytes
from mrl.learn.policy import make_policy
from mrl.preflight.lora import check_lora
from mrl.preflight.resume import check_adapter, resume_step
from mrl.rollout.base import EngineLost
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.heartbeat import beat, phase
from mrl.system.memory_error import out_of_memory
from mrl.tenants.colocated_house import ColocatedHouse
from mrl.tenants.record import engine_name, name_of
from mrl.tenants.sessions.bodies import KINDS, Body, ForwardBackwardBody, SampleBody
from mrl.tenants.sessions.operations import Operations
from mrl.tenants.sessions.recipe import check_session
from mrl.tenants.sessions.records import SampleRecords
from mrl.tenants.sessions.sampling import SessionSampler
from mrl.tenants.sessions.trainer import SessionTrainer
from mrl.tenants.tenant_run import Trained
from mrl.tenants.tokenizer import ServiceTokenizer
from parallel.hf_config import HfModel

ENDS_SERVICE = (EngineGone, EngineLost, RankLost, OutOfMemory, MemoryError, dist.DistError)


class SessionRun(Trained):
    """Carries out the operations of one session. Every method but the properties is a collective."""

    is_done = is_over = False
    """A session has no last step."""

    def __init__(
        self,
        incarnation: str,
        weight: float,
        recipe: Recipe,
        house: ColocatedHouse,
        operations: Operations | None,
        agree: Callable[[str], str],
    ) -> None:
        """Bring the session to its newest checkpoint. `incarnation`: see `Tenant`. `operations`: None
        on all ranks but the first. `agree` returns what went wrong on the first rank on which anything
        did (`Accord.first`).

        Raises InputError for a recipe that cannot start, RunFailed where its checkpoint cannot be read.
        """
        self.name, self._incarnation = (name := name_of(incarnation)), incarnation
        self._house, self._operations, self._agree = house, operations, agree
        mesh = house.mesh
        check_session(recipe)
        model = HfModel.read(recipe.model.path, recipe.model.architecture)
        adapter = _adapter(recipe, model)
        native = recipe.model.model_copy(update={"transformer_impl": "local"})
        self._recipe = recipe = recipe.model_copy(update={"model": native})
        self.folder = RunFolder(recipe.output_dir)
        with ExitStack() as undo:
            undo.callback(self.folder.close)
            if mesh.rank == 0:
                self.folder.claim()  # before anything looks for a checkpoint
            check_adapter(self.folder, adapter)
            update = self.folder.check(recipe)
            warn = console.warning if mesh.rank == 0 else lambda text: None
            step = resume_step(self.folder, warn)
            if mesh.rank == 0:
                self.folder.open(recipe, update, step or 0)
            self.policy = make_policy(
                recipe, model, mesh, adapter, trains=True, base=house.base, name=name
            )
            undo.callback(self.policy.close)
            keeps_routes = recipe.captures_routes
            place = house.tenant_slot(engine_name(incarnation), adapter, weight), house.group
            self._sampler = SessionSampler(
                recipe, mesh, place, model.sizes.vocab_size, keeps_routes=keeps_routes
            )
            undo.callback(self._sampler.close)
            self._trainer = SessionTrainer(
                recipe, mesh, self.folder, self.policy, self._sampler.samples
            )
            self._trainer.resume(step)
            undo.pop_all()
        self._records = SampleRecords(
            self.folder, ServiceTokenizer(model), recipe.rollout.temperature
        )
        if operations is not None:
            operations.begin(incarnation, self._trainer.version)
        self._waiting_tokens = 0
        self._asked: dict[str, SampleBody] = {}
        """The sample operations of the turn."""
        self._turn: list[tuple[str, Body]] = []
        """What is left of the turn, by the ids of the operations."""
        super().__init__()

    @property
    def step(self) -> int:
        """The version of its weights."""
        return self._trainer.version

    @property
    def wants_turn(self) -> bool:
        """Whether an operation waits, as rank 0 said last."""
        return self._waiting_tokens > 0

    @property
    def tokens_of_step(self) -> int:
        """The most tokens that the samples of the next turn can hold."""
        return self._waiting_tokens

    @property
    def trains(self) -> bool:
        """Whether the turn has something for the trainer."""
        return bool(self._turn)

    @property
    def has_samples(self) -> bool:
        """Whether nothing is left to be generated in this phase."""
        return self._sampler.is_over

    @property
    def num_remaining(self) -> int:
        """Return 1 where this rank's engine has something left to generate."""
        return self._sampler.num_remaining

    def heed(self, waiting_tokens: int) -> None:
        """Be told what waits, as rank 0 knows it: tokens of the next turn's samples, 0 for nothing."""
        self._waiting_tokens = waiting_tokens

    def begin(self) -> None:
        """Take the operations of the next turn from the queue."""
        said = b""
        if self._operations is not None:
            taken = self._operations.take(self._incarnation)
            bodies = [(each.id, each.body.model_dump(mode="json")) for each in taken]
            said = json.dumps(bodies).encode()
        turn: list[tuple[str, Body]] = [
            (name, KINDS[body["kind"]].model_validate(body))
            for name, body in json.loads(share_bytes(said)[0])
        ]
        asked = {
            name: (body, self._seed(name) if body.seed is None else body.seed)
            for name, body in turn
            if isinstance(body, SampleBody)
        }
        self._asked = {name: body for name, (body, _) in asked.items()}
        self._turn = [(name, body) for name, body in turn if name not in asked]
        self._sampler.begin(asked)

    def _seed(self, operation: str) -> int:
        """Return the seed of a sample operation that gives none."""
        return self._recipe.seed * 1_000_003 + int(operation.partition("-")[2])

    def prepare_sync(self) -> None:
        """Compute what the engine must answer to the canaries. The base is on the device."""
        self.policy.mount(adapter_only=True)
        self._sampler.prepare_sync(self.policy, self.step)

    def send(self) -> None:
        """Send the adapter to the engine, which is awake, unless it has this version."""
        self.policy.mount(adapter_only=True)
        self._sampler.send(self.policy, self.step)

    def check_sync(self) -> None:
        """Compare the engine's canaries with the trainer's, once its cache is awake."""
        self._sampler.check_sync()

    def generate(self) -> None:
        """Generate what is left of the turn on this rank's engine. This is no collective."""
        self._sampler.generate()

    def end_generation(self, *, was_lost: bool) -> None:
        """Find out whether the turn is generated. `was_lost`: whether any engine was."""
        self._sampler.end_generation(was_lost=was_lost)

    def score(self) -> None:
        """Answer the sample operations of a generated turn. Raises RunFailed if they have killed the
        engine too often."""
        asked = self._sampler.asked
        if (found := self._sampler.finish()) is None:
            return
        results, failures = found
        for name in asked:
            self._answer(name, results.get(name), failures.get(name, ""))
        for name, result in results.items():
            self._record(partial(self._records.add, self.step, self._asked[name], result))
        self._sampler.check_behaviour()

    @phase("train")
    def train(self) -> None:
        """Carry out and answer the other operations of the turn, one after the other."""
        self.swap = self.policy.mount()
        start = time.perf_counter()
        while self._turn:
            name, body = self._turn.pop(0)
            beat()
            result, failure = self._carried_out(name, body)
            if failure:
                self._trainer.note_failure(name, body)
            self._answer(name, result, failure)
            if isinstance(body, ForwardBackwardBody) and not failure:
                self._record(partial(self._records.train, self.step, body, result))
        self.update_s = time.perf_counter() - start

    def _carried_out(self, name: str, body: Body) -> tuple[Any, str]:
        """Return the result of an operation, or what went wrong with it on any rank."""
        result, failure = None, ""
        try:
            result = self._trainer.run(name, body)
        except ENDS_SERVICE:
            raise
        except (ValueError, RuntimeError, OSError) as error:
            if out_of_memory(error):
                raise
            failure = " ".join(str(error).split()) or type(error).__name__
        return result, self._agree(failure)

    def _record(self, write: Callable[[], None]) -> None:
        """Write samples for the page of the run, on rank 0. A failure is only a warning, and does not
        affect the client."""
        if self._house.mesh.rank == 0:
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
        """Save the present version, where no checkpoint has it yet, and end the run. Gradients that no
        optimizer step has used are forgotten."""
        try:
            self.policy.mount()
            self._trainer.save()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of everything, without a save; what waits in the queue is lost. Harmless when
        repeated."""
        with ExitStack() as closing:  # whatever one of them raises, the others are closed
            closing.callback(self.folder.close)
            closing.callback(self.policy.close)
            closing.callback(self._sampler.close)
            closing.callback(self._trainer.checkpoints.rescue)
            if self._operations is not None:
                self._operations.end(self._incarnation)


def _adapter(recipe: Recipe, model: HfModel) -> Adapter:
    """Return the adapter that a session trains. Raises InputError if it has none."""
    if (adapter := check_lora(recipe, model)) is None:
        raise InputError("lora: got none, but a session trains an adapter; add a lora section")
    return adapter
