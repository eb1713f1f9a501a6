"""Carries out the training operations of a session on one rank. Every method is a collective."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config import Recipe
from mrl.errors import InputError
from mrl.exchange.rollouts import RolloutExchange
from mrl.learn.named_losses import LOSSES
from mrl.learn.packs import shares_prefixes
from mrl.learn.saves import make_checkpoints, make_named_checkpoints
from mrl.learn.sequences import SequenceTrainer, Weighted
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.service.sessions import saved
from mrl.service.sessions.bodies import (
    DropGradientsBody,
    ForwardBackwardBody,
    ForwardBody,
    LoadBody,
    OptimStepBody,
    SaveBody,
    SaveSamplerBody,
    SequenceBody,
    factors_of,
)
from mrl.service.sessions.samplers import Samplers
from mrl.service.sessions.samples import Match, Samples
from mrl.system.heartbeat import phase
from parallel.checkpoint.manifest import candidates, folder_name, step_of
from parallel.mesh import Mesh
from parallel.optimizer.kept_gradients import KeptGradients
from parallel.policy import Policy


class SessionTrainer:
    """Holds the version number of a session's weights, and the gradients that were accumulated since
    the session's last optimizer step.

    Each optimizer step and each `load` makes a new version and writes one row of metrics.jsonl. No
    version number is used twice while the session is open. The policy's state must be on the device
    (`Policy.mount`) when a method is called.
    """

    def __init__(
        self, recipe: Recipe, mesh: Mesh, folder: RunFolder, policy: Policy, samples: Samples
    ) -> None:
        self._recipe, self._mesh, self._folder = recipe, mesh, folder
        self._policy, self._samples = policy, samples
        self.samplers = Samplers(mesh, folder, policy, recipe.seed)
        self._steps = SequenceTrainer(
            policy,
            mesh,
            RolloutExchange(mesh, policy.moe_layers),
            recipe.train.micro_batch_tokens,
            share_prefixes=shares_prefixes(recipe.train, [policy], console.warn_on(mesh.rank == 0)),
        )
        self._replays = recipe.moe.routing_replay == "r3"
        self._gradients = KeptGradients(policy)
        self._loss = 0.0
        self._failed = ""
        """The id of the first forward_backward operation that has failed since the last optimizer
        step, so that its gradients are missing; empty if none has failed."""
        self.checkpoints = make_checkpoints(recipe, mesh, folder)
        self.version = 0

    def resume(self, step: int | None) -> None:
        """Load the newest checkpoint, and remove records of later versions from the run folder.
        `step`: the version in the newest checkpoint; None if there is no checkpoint."""
        if step is not None:
            self.version = self.checkpoints.load_newest(self._policy).step
        if self._mesh.rank == 0:
            self._folder.rewind(self.version)

    def run(self, body: Any) -> dict[str, Any]:
        """Carry out an operation and return its result. If the operation raises an error, the
        weights have not changed."""
        actions: Mapping[type, Callable[[Any], dict[str, Any]]] = {
            ForwardBody: self._forward,
            ForwardBackwardBody: self._forward_backward,
            OptimStepBody: self._optim_step,
            DropGradientsBody: self._drop_gradients,
            SaveBody: self._save,
            SaveSamplerBody: self._save_sampler,
            LoadBody: self._load,
        }
        with phase(part_of(body, self._recipe.train.micro_batch_tokens)):
            return actions[type(body)](body)

    def note_failure(self, name: str, body: Any) -> None:
        """Record that an operation failed. If it is a forward_backward, the next optimizer step is
        refused, because some of that step's gradients are missing."""
        if isinstance(body, ForwardBackwardBody):
            self._failed = self._failed or name

    def save(self) -> None:
        """Save the present version unless a checkpoint has it already, and wait until the
        checkpoint is complete."""
        self.checkpoints.finish()
        if self.version not in self._saved():
            self.checkpoints.save(self.version, self._policy, {"session": self.version})
            self.checkpoints.finish()

    def _forward(self, body: ForwardBody) -> dict[str, Any]:
        sequences, _ = self._weighted(body)
        return {"logprobs": self._steps.forward(sequences).logprobs}

    def _forward_backward(self, body: ForwardBackwardBody) -> dict[str, Any]:
        sequences, ambiguous_rows = self._weighted(body)
        passed = self._steps.compute_gradients(
            sequences, LOSSES[body.loss], body.options(), scores_all=body.all_logprobs
        )
        self._gradients.add()
        loss = passed.metrics.get(self._policy.loss_key, math.nan)
        self._loss += loss
        metrics = passed.metrics | _replayed(sequences)
        metrics["session/ambiguous_rows"] = float(ambiguous_rows)
        return {"loss": loss, "logprobs": passed.logprobs, "metrics": metrics}

    def _optim_step(self, body: OptimStepBody) -> dict[str, Any]:
        failed, self._failed = self._failed, ""
        if failed:
            self._forget_gradients()
            raise InputError(
                f"forward_backward {failed} failed, so its gradients are missing; those of the others "
                "are dropped: begin the step again"
            )
        if not self._gradients:
            raise InputError(
                "there are no gradients; forward_backward comes before optim_step, and those of before "
                "the session was opened are lost"
            )
        try:
            self._gradients.require_finite()
            self._gradients.put_back()
            grad_norm, lr = self._policy.apply_gradients(body.settings())
        finally:
            loss = self._loss
            self._forget_gradients()
        self._next_version({"loss/policy": loss, "grad_norm": grad_norm, "lr": lr})
        return {"version": self.version, "grad_norm": grad_norm, "lr": lr}

    def _drop_gradients(self, body: DropGradientsBody) -> dict[str, Any]:
        self._failed = ""
        self._forget_gradients()
        if body.reason is not None:
            raise InputError(body.reason)
        return {"version": self.version}

    def _save(self, body: SaveBody) -> dict[str, Any]:
        if body.name is None:
            self.save()
            folder = self._folder.checkpoints / folder_name(self.version)
            return {"version": self.version, "folder": str(folder)}
        root, name = self._folder.root, body.name
        if not body.overwrite and saved.find(root, "states", name) is not None:
            raise InputError(
                f"there is a state {name!r} already; take another name, or set overwrite"
            )
        place = saved.folder_of(root, "states", name)
        store = make_named_checkpoints(place, self._mesh, self._recipe.seed)
        folder = store.save(self.version, self._policy, {"session": self.version})
        store.finish()
        if self._mesh.rank == 0:
            saved.keep_one(place, self.version)
        return {"version": self.version, "folder": str(folder), "name": name}

    def _save_sampler(self, body: SaveSamplerBody) -> dict[str, Any]:
        folder = self.samplers.save(body.name, self.version, overwrite=body.overwrite)
        return {"version": self.version, "folder": str(folder), "name": body.name}

    def _load(self, body: LoadBody) -> dict[str, Any]:
        self.checkpoints.finish()
        folder = self._folder_of(body)
        store = self.checkpoints
        if body.folder is not None:  # whose seed is not taken over
            store = make_named_checkpoints(folder, self._mesh, self._recipe.seed)
        loaded = store.load_folder(folder, self._policy, with_optimizer=body.optimizer)
        if not body.optimizer:
            self._policy.make_optimizer(self._recipe.optimizer)
        self._forget_gradients()
        self._failed = ""
        self._next_version({"session/loaded_version": float(loaded.step)})
        return {"version": self.version}

    def _folder_of(self, body: LoadBody) -> Path:
        """Return the checkpoint folder that `load` asks for. Raises InputError if there is none."""
        if body.name is not None:
            return saved.require(self._folder.root, "states", body.name)
        if body.folder is not None:
            return saved.require_checkpoint(Path(body.folder), with_optimizer=body.optimizer)
        if body.version not in (there := self._saved()):
            raise InputError(
                f"there is no checkpoint of version {body.version}; there are: "
                f"{', '.join(map(str, sorted(there))) or 'none'}"
            )
        assert body.version is not None
        return self._folder.checkpoints / folder_name(body.version)

    def _saved(self) -> set[int]:
        return {step_of(each) for each in candidates(self._folder.checkpoints)}

    def _forget_gradients(self) -> None:
        self._gradients.clear()
        self._loss = 0.0

    def _next_version(self, metrics: dict[str, float]) -> None:
        self.samplers.note_change()
        row = {"step": self.version, **metrics, "time/timestamp": time.time()}
        self.version += 1
        if self._mesh.rank == 0:
            self._folder.add_metrics(row)
            console.step_line(row, name=self._policy.name)

    def _weighted(self, body: ForwardBody | ForwardBackwardBody) -> tuple[list[Weighted], int]:
        """Return the sequences of an operation in the form that the trainer takes, and the number of
        rows of those whose routes are one sample's of several that it could be. Raises InputError as
        `_routes` does."""
        sequences: list[Weighted] = []
        ambiguous_rows = 0
        for given in body.sequences:
            tokens, old = torch.tensor(given.tokens), None
            if given.logprobs is not None:
                old = torch.tensor(given.logprobs, dtype=torch.float32)
            match = self._routes(given, tokens, old, matches=body.replay == "match")
            ambiguous_rows += match.is_ambiguous * (len(tokens) - 1)
            mask = None if given.ratio_mask is None else torch.tensor(given.ratio_mask) != 0
            sequences.append(
                Weighted(
                    token_ids=tokens,
                    factors=torch.tensor(factors_of(given), dtype=torch.float32),
                    old_logprobs=old,
                    weight=given.weight,
                    routing=match.routing,
                    targets=None if given.targets is None else torch.tensor(given.targets),
                    in_loss=mask,
                )
            )
        return sequences, ambiguous_rows

    def _routes(
        self, given: SequenceBody, tokens: Tensor, old: Tensor | None, *, matches: bool
    ) -> Match:
        """Return the routes that a sequence replays. `matches`: whether these are of a kept sample with
        its tokens, if there is one. Otherwise raises InputError if the sequence names a sample although
        the session does not replay routes, or if the sample's routes are not kept."""
        if matches:
            return self._samples.find(given.sample, tokens, old) if self._replays else Match()
        if given.sample is not None:
            if not self._replays:
                raise InputError(
                    "sample names routes to replay, but the session has moe.routing_replay=off; leave "
                    "`sample` out"
                )
            return Match(self._samples.routes_of(given.sample, tokens))
        return Match()


def part_of(body: Any, micro_batch_tokens: int) -> str:
    """Return the part of the phase `train` in which an operation is carried out.

    The watchdog learns the limit of each part by itself. Operations of different kinds have different
    parts, and so have passes whose micro-batches differ by a factor of two or more: a client may begin
    with a pass over ten tokens, and its next one may take a thousand times as long.
    """
    sequences = getattr(body, "sequences", None)
    if sequences is None:
        return f"train:{body.kind}"
    lengths = [len(each.tokens) for each in sequences]
    largest = max(*lengths, min(sum(lengths), micro_batch_tokens))
    return f"train:{body.kind}-{largest.bit_length()}"


def _replayed(sequences: Sequence[Weighted]) -> dict[str, float]:
    """Return how many rows (tokens but the last of each sequence) had replayed routes, and for how many
    the trainer's routers chose."""
    rows = [(len(each.token_ids) - 1, each.routing is not None) for each in sequences]
    return {
        "session/replayed_rows": float(sum(count for count, has in rows if has)),
        "session/native_rows": float(sum(count for count, has in rows if not has)),
    }
