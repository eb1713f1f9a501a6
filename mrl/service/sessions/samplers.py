"""The weights with which a session samples: the present ones, those of a saved sampler, or the base
model's. Every method is a collective unless noted otherwise."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from mrl.errors import InputError
from mrl.learn.saves import make_named_checkpoints
from mrl.run.folder import RunFolder
from mrl.service.sessions import saved
from mrl.service.sessions.bodies import BASE
from parallel.checkpoint.manifest import folder_name, step_of
from parallel.mesh import Mesh
from parallel.policy import Policy
from parallel.reference import ReferenceWeights

MAX_ON_HOST = 4
"""Maximum number of samplers whose weights are kept in host memory; the others are read from disk."""
FIRST_LABEL = 1 << 30
"""The engine knows the weights of samplers by numbers from here on, and the present ones by their
version. A version can return with other weights after a restart, and a label cannot."""


@dataclass(frozen=True)
class Source:
    """The weights with which the samples of a turn are drawn."""

    name: str | None
    """The name of a saved sampler, or BASE; None for the present weights."""
    label: int
    """The version under which the engine knows them."""
    version: int
    """The version that the samples show; -1 for the base model."""


class Samplers:
    """Saves the samplers of a session, and puts their weights in the place of the present ones."""

    def __init__(self, mesh: Mesh, folder: RunFolder, policy: Policy, seed: int) -> None:
        self._mesh, self._folder, self._policy, self._seed = mesh, folder, policy, seed
        self._present: set[str] = set()
        """The samplers that were saved since the weights changed last."""
        self._labels: dict[str, int] = {}
        self._num_labels = 0
        self._on_host: OrderedDict[str, ReferenceWeights] = OrderedDict()

    def note_change(self) -> None:
        """Record that the weights have changed. Not a collective."""
        self._present.clear()

    def save(self, name: str, version: int, *, overwrite: bool) -> Path:
        """Save the present weights, of `version`, as a sampler; return its folder. The policy's state
        must be on the device. Raises InputError if there is a sampler of this name."""
        root = self._folder.root
        if not overwrite and saved.find(root, "samplers", name) is not None:
            raise InputError(
                f"there is a sampler {name!r} already; take another name, or set overwrite"
            )
        folder = saved.folder_of(root, "samplers", name)
        store = make_named_checkpoints(folder, self._mesh, self._seed)
        about = {"session": version, "weights_only": True}
        found = store.save(version, self._policy, about, with_optimizer=False)
        store.finish()
        if self._mesh.rank == 0:
            saved.keep_one(folder, version)
        self._label(name)
        self._keep(name, self._policy.snapshot())
        self._present.add(name)
        return found

    def version_of(self, name: str | None) -> int:
        """Return the version of the weights of the sampler `name`; -1 for the base model and for None,
        the present weights. Not a collective. Raises InputError if there is no such sampler."""
        if name is None or name == BASE:
            return -1
        return step_of(saved.require(self._folder.root, "samplers", name))

    def source(self, name: str | None, saved_version: int, version: int) -> Source:
        """Return the weights of the sampler `name`. `saved_version`: the result of `version_of` on rank
        0. `version`: that of the present weights. Not a collective."""
        if name is None or name in self._present:
            return Source(None, version, version)
        return Source(name, self._labels.get(name) or self._label(name), saved_version)

    def in_place(self, source: Source) -> AbstractContextManager[None]:
        """Put the weights of a source in the place of the present ones, inside the block. The base
        model and the adapter must be on the device. Raises InputError if they cannot be read."""
        if source.name is None:
            return nullcontext()
        weights = self._on_host.get(source.name)
        if weights is None:
            weights = self._read(source)
        self._keep(source.name, weights)
        self._policy.gather_parameters()
        return weights.swapped_in()

    def _read(self, source: Source) -> ReferenceWeights:
        """Read the weights of a sampler; those of the base model are zeros."""
        policy = self._policy
        with policy.snapshot().swapped_in():
            if source.name == BASE:
                with torch.no_grad():
                    for entry in policy.trained.entries:
                        entry.parameter.zero_()
            else:
                assert source.name is not None
                place = saved.folder_of(self._folder.root, "samplers", source.name)
                store = make_named_checkpoints(place, self._mesh, self._seed)
                folder = place / folder_name(source.version)
                store.load_folder(folder, policy, with_optimizer=False, advice="save it again")
            return policy.snapshot()

    def _keep(self, name: str, weights: ReferenceWeights) -> None:
        self._on_host[name] = weights
        self._on_host.move_to_end(name)
        while len(self._on_host) > MAX_ON_HOST:
            self._on_host.popitem(last=False)

    def _label(self, name: str) -> int:
        self._labels[name] = FIRST_LABEL + self._num_labels
        self._num_labels += 1
        return self._labels[name]
