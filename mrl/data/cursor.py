"""Iterates over the prompts of a data set or a mixture in a seeded order. The position can be saved,
and a resumed run neither skips nor repeats rows."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mrl.data.reader import Source
from mrl.errors import InputError
from mrl.types import Prompt


class PromptCursor:
    """Returns prompts in batches: with `shuffle` in a new permutation for each epoch, otherwise in
    the order of the data. A batch may span several epochs.

    The saved state is (seed, shuffle, epoch, offset) and a digest of the data. This is sufficient,
    because the permutation of an epoch depends only on (seed, epoch). If sources have weights, they
    form a mixture: each source has its own permutation, epoch and offset, and a `credit` that
    decides which source is next.
    """

    def __init__(
        self, prompts: Sequence[Prompt] | Sequence[Source], *, seed: int, shuffle: bool = True
    ) -> None:
        """`prompts` are the prompts of one data set, or the sources of the training data. Sources
        without weights form one data set. Raises InputError if a data set has no prompts."""
        sources = [each for each in prompts if isinstance(each, Source)]
        whole = [each for each in prompts if isinstance(each, Prompt)]
        self._sources = sources if len(sources) > 1 else []
        self._is_mixture = any(source.weight is not None for source in self._sources)
        self._seed, self._shuffle = seed, shuffle
        if self._is_mixture:
            self._dealers = [Dealer(s.prompts, f"/{s.name}", s.weight or 0.0) for s in sources]
        else:
            whole += [prompt for source in sources for prompt in source.prompts]
            self._dealers = [Dealer(whole, "", 1.0)]
        for dealer in self._dealers:
            dealer.place(seed, shuffle=shuffle)
        # If one of several sources has changed, the error message can name it.
        self._digests = [digest_of(source.prompts) for source in self._sources]
        self._digest = "" if self._is_mixture else digest_of(self._dealers[0].prompts)

    @property
    def epoch(self) -> int:
        """The number of complete passes over the data set. In a mixture, the number of complete
        passes over the source with the fewest passes."""
        return min(dealer.epoch for dealer in self._dealers)

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts."""
        return [self._dealer().deal() for _ in range(n)]

    def _dealer(self) -> Dealer:
        """Return the `Dealer` of the source from which the next prompt comes. Smooth weighted
        round-robin chooses the source and updates the credits.

        After every prompt, the number of prompts taken from a source differs from the source's
        share by about one at most, so every step mixes the sources according to their weights. The
        choice depends only on the credits, not on random numbers.
        """
        if len(self._dealers) == 1:
            return self._dealers[0]
        total = sum(dealer.weight for dealer in self._dealers)
        for dealer in self._dealers:
            dealer.credit += dealer.weight / total
        chosen = max(self._dealers, key=lambda dealer: dealer.credit)  # on a tie, the first
        chosen.credit -= 1.0
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return the state in JSON types. After `load_state_dict` with this state, the cursor returns
        the same next prompts."""
        state = {"seed": self._seed, "shuffle": self._shuffle}
        identity = [
            {"name": source.name, "num_prompts": len(source.prompts), "sha256": digest}
            for source, digest in zip(self._sources, self._digests, strict=True)
        ]
        if self._is_mixture:
            places = [
                {"epoch": d.epoch, "offset": d.offset, "credit": d.credit}
                | ({"order": d.salt} if d.salt != f"/{one['name']}" else {})
                for d, one in zip(self._dealers, identity, strict=True)
            ]
            return state | {
                "mixture": [one | place for one, place in zip(identity, places, strict=True)]
            }
        dealer = self._dealers[0]
        return {
            **state,
            "epoch": dealer.epoch,
            "offset": dealer.offset,
            "num_prompts": len(dealer.prompts),
            "sha256": self._digest,
            **({"sources": identity} if identity else {}),
        }

    def why_other(self, state: dict[str, Any]) -> str:
        """Return a text that says how the rows or `shuffle` differ from the saved `state`; empty if
        they do not differ."""
        try:
            self._places_in(state)
        except InputError as error:
            return str(error).removeprefix("cannot resume: ")
        if state["shuffle"] != self._shuffle:
            return f"data.shuffle was {str(state['shuffle']).lower()}"
        return ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, with the seed and the `shuffle` of the state.

        Sources are identified by their rows, even if their names have changed. Raises InputError if
        the state belongs to other data; if there are several sources, the message names the sources
        that differ.
        """
        places = self._places_in(state)
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        for dealer, place in zip(self._dealers, places, strict=True):
            dealer.epoch, dealer.offset = place["epoch"], place["offset"]
            dealer.credit = place.get("credit", 0.0)
            if self._is_mixture:
                dealer.salt = place.get("order", f"/{place['name']}")
            dealer.place(self._seed, shuffle=self._shuffle)

    def _places_in(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one part of `state` for each `Dealer`, in order. Each part has the dealer's epoch
        and offset and, in a mixture, the dealer's credit. Raises InputError like
        `load_state_dict`."""
        was_mixture = "mixture" in state
        if was_mixture != self._is_mixture:
            kinds = ("one data set", "a mixture with weights")
            raise InputError(
                f"cannot resume: the checkpoint was made with {kinds[was_mixture]}, the recipe has "
                f"{kinds[self._is_mixture]}; restore data.path or data.sources, or start a new run"
            )
        if was_mixture:
            return self._check_sources(state["mixture"])
        self._check_whole(state)
        return [state]

    def _check_whole(self, state: dict[str, Any]) -> None:
        num_prompts = len(self._dealers[0].prompts)
        is_same = state["num_prompts"] == num_prompts and state["sha256"] == self._digest
        if not is_same and state.get("sources") and self._digests:
            self._check_sources(state["sources"])
            names = ", ".join(one["name"] for one in state["sources"])
            raise InputError(
                f"cannot resume: the sources of the data were in another order: {names}; restore it"
            )
        if state["num_prompts"] != num_prompts:
            raise InputError(
                f"cannot resume: the checkpoint was made with {state['num_prompts']} prompts, "
                f"the data file has {num_prompts}; restore the file or start a new run"
            )
        if not is_same:
            raise InputError(
                f"cannot resume: the {num_prompts} prompts are not those of the checkpoint "
                f"(SHA-256 {self._digest[:12]}, expected {state['sha256'][:12]}); restore the "
                "file or start a new run"
            )

    def _check_sources(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the `saved` sources in the order of the cursor's sources. Raises InputError if the
        sources do not have the same rows."""
        left, found = list(saved), {}
        for has_name in (True, False):  # among sources with equal rows, prefer the same name
            for source, digest in zip(self._sources, self._digests, strict=True):
                same = (
                    one
                    for one in left
                    if (one["num_prompts"], one["sha256"]) == (len(source.prompts), digest)
                    and (one["name"] == source.name or not has_name)
                )
                if source.name not in found and (one := next(same, None)) is not None:
                    found[source.name] = one
                    left.remove(one)
        if not left and len(found) == len(self._sources):
            return [found[source.name] for source in self._sources]
        self._refuse_sources(saved)

    def _refuse_sources(self, saved: list[dict[str, Any]]) -> NoReturn:
        """Raise InputError. The message names the first source whose rows differ from the rows
        saved under the same name. If there is no such source, the message lists the saved and the
        current sources."""
        by_name = {one["name"]: one for one in saved}
        for source, digest in zip(self._sources, self._digests, strict=True):
            one = by_name.get(source.name)
            if one and (one["num_prompts"], one["sha256"]) != (len(source.prompts), digest):
                raise InputError(
                    f"cannot resume: the {len(source.prompts)} prompts of the source {source.name} are "
                    f"not the {one['num_prompts']} of the checkpoint (SHA-256 {digest[:12]}, expected "
                    f"{one['sha256'][:12]}); restore the file or start a new run"
                )
        names = ", ".join(source.name for source in self._sources)
        raise InputError(
            f"cannot resume: the checkpoint was made with the sources {', '.join(by_name)}, the "
            f"recipe has {names}, and not all of them have the same rows; restore them or start a new "
            "run"
        )


class Dealer:
    """Returns the prompts of one data set, or of one source of a mixture, one at a time. If
    the data are shuffled, each epoch has a new order; otherwise the order is that of the data."""

    def __init__(self, prompts: list[Prompt], salt: str, weight: float) -> None:
        """`salt` is a text that is appended to the seed, so that each source of a mixture has a
        different order. For a source of a mixture, `salt` is `/` plus the name that the source had
        when the run began; for a single data set, it is empty. `weight` is the source's share of
        the mixture, relative to the weights of the other sources. Raises InputError if there are no
        prompts."""
        if not prompts:
            raise InputError("the data set has no prompts")
        self.prompts, self.weight = prompts, weight
        self.epoch, self.offset, self.credit = 0, 0, 0.0
        self.salt = salt
        self._seed, self._shuffle = 0, True
        self._order: list[int] = []

    def place(self, seed: int, *, shuffle: bool) -> None:
        """Compute the order of the prompts in the current epoch, from `seed`, the salt and the epoch.
        If `shuffle` is false, it is the order of the data."""
        self._seed, self._shuffle = seed, shuffle
        self._order = list(range(len(self.prompts)))
        if shuffle:
            # A string seeds through SHA-512: no collisions between (1, 23) and (12, 3).
            random.Random(f"{seed}{self.salt}/{self.epoch}").shuffle(self._order)

    def deal(self) -> Prompt:
        """Return the next prompt. After the last prompt of an epoch, the next epoch begins."""
        prompt = self.prompts[self._order[self.offset]]
        self.offset += 1
        if self.offset == len(self.prompts):
            self.epoch, self.offset = self.epoch + 1, 0
            self.place(self._seed, shuffle=self._shuffle)
        return prompt


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256, in hex, of the token ids, contents and columns of the prompts. The policy
    and the reward see nothing else of a prompt."""
    sha = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.token_ids.tolist(), prompt.content, prompt.columns]
        sha.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return sha.hexdigest()
