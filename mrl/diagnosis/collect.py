"""Write a step's token record, and the decomposition of its trainer-engine mismatch.

A token record holds the values that trainer and engine computed for each token. The decomposition
says which routes and layers cause the mismatch.

The files OUTPUT_DIR/tokens/step_*.safetensors and OUTPUT_DIR/diagnosis/step_*.json are written
before the update, so they exist even if the update fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import torch

from mrl.config import Recipe
from mrl.diagnosis.decompose import decompose
from mrl.diagnosis.gather import gather_tokens
from mrl.diagnosis.pieces import token_pieces
from mrl.diagnosis.tokens import TokenRecord, save_tokens
from mrl.quantization import SCHEMES, fake_quantize
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.files import write_whole
from mrl.types import MicroBatch, Sample
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype
from parallel.mesh import Mesh
from parallel.pass_output import Observe, PassOutput
from parallel.policy import Policy

LONG_S = 60.0
"""Seconds of a decomposition above which the run says, once, how to shorten it."""


@dataclass
class Diagnosis:
    """Writes the token records and the mismatch decompositions of a run.

    Every rank needs an instance, because `before_update`, `save_tokens` and `token_record` are
    collective operations: all ranks must call them together. Rank 0 writes the files.
    """

    recipe: Recipe
    model: HfModel
    tokenizer: Any
    mesh: Mesh
    policy: Policy
    folder: RunFolder
    _pieces: dict[int, str] = field(default_factory=dict)
    _said_long: bool = False

    def observe(self, step: int) -> Observe | None:
        """Return what the forward pass before the update must record about the routers.

        The result is None if the recipe captures no routes. Otherwise it is `rows` (record the
        route of every row) if the step gets a token record, and `counts` (record only statistics)
        if it does not.
        """
        if not self.recipe.captures_routes:
            return None
        return "rows" if self.saves_tokens(step) else "counts"

    def before_update(
        self,
        step: int,
        samples: Sequence[Sample],
        batches: Sequence[MicroBatch],
        old: PassOutput,
    ) -> dict[str, float]:
        """Write the token record and the mismatch decomposition of a step, if the step gets them.

        All ranks must call this together. The decomposition uses a single micro-batch of each
        data-parallel rank. The arguments are those of `save_tokens`.

        Returns the metrics `decompose/*`, or {} if the step gets no decomposition.
        """
        self.save_tokens(step, samples, batches, old)
        if not self.decomposes(step):
            return {}
        every = self.recipe.diagnosis.decompose_every
        return self._decompose(step, batches[(step // every) % len(batches)])

    def save_tokens(
        self,
        step: int,
        samples: Sequence[Sample],
        batches: Sequence[MicroBatch],
        old: PassOutput,
    ) -> None:
        """Write the token record of a step, if the step gets one. All ranks must call this together.

        samples: all samples of the step, the same on every rank. batches: the micro-batches of
        this rank. old: the output of a forward pass over `batches` with the weights before the
        update. Once the record has been made, `old.observed` is cleared to free memory.
        """
        if not self.saves_tokens(step):
            return
        record = self.token_record(step, samples, batches, old)
        if record is not None:
            self.folder.tokens.mkdir(exist_ok=True)
            save_tokens(self.folder.token_file(step), record)
        old.observed.clear()

    def saves_tokens(self, step: int) -> bool:
        """Return whether the step gets a token record."""
        every = self.recipe.diagnosis.save_tokens_every
        return bool(every) and step % every == 0

    def decomposes(self, step: int) -> bool:
        """Return whether the mismatch of the step is decomposed."""
        every = self.recipe.diagnosis.decompose_every
        return bool(every) and step % every == 0

    def token_record(
        self,
        step: int,
        samples: Sequence[Sample],
        batches: Sequence[MicroBatch],
        old: PassOutput,
    ) -> TokenRecord | None:
        """Return the token record on rank 0, and None on the other ranks.

        All ranks must call this together. The arguments are those of `save_tokens`.
        """
        recipe, model = self.recipe, self.model
        layers = model.moe_layer_numbers
        limit = recipe.diagnosis.max_tokens
        gathered = gather_tokens(self.policy, samples, batches, old, layers, limit)
        if gathered is None:
            return None
        chosen, tensors = gathered
        fields: dict[str, Any] = {**tensors}
        has_routes = "native_ids" in fields
        return TokenRecord(
            step=step,
            version=step,
            temperature=recipe.rollout.temperature,
            routing_replay=recipe.moe.routing_replay,
            layer_numbers=tuple(layers) if has_routes else (),
            num_experts=model.sizes.num_experts if has_routes else 0,
            num_samples_of_step=len(samples),
            sample_ids=torch.tensor(chosen.ids, dtype=torch.int64),
            cu_seqlens=chosen.cu_seqlens,
            pieces=self._texts(fields["token_ids"].unique().tolist()),
            **fields,
        )

    def _texts(self, token_ids: list[int]) -> dict[int, str]:
        """Return a dict with the text of each token id."""
        new = [i for i in token_ids if i not in self._pieces]
        self._pieces |= token_pieces(self.tokenizer, new)
        return {i: self._pieces[i] for i in token_ids}

    def _quantized(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a function that makes a context manager. Inside the block of the context manager,
        the policy's weights are quantised as in the engines. Return None if the engines do not
        quantise."""
        rollout = self.recipe.rollout
        if rollout.quantization == "none" or self.recipe.lora is not None:
            return None  # the engine's weights are quantised with the adapter added to them
        dtype = choose_dtype(rollout.engine_dtype(self.recipe.model))
        quantize = partial(fake_quantize, SCHEMES[rollout.quantization])
        return partial(self.policy.fake_quantized, quantize, dtype)

    def _decompose(self, step: int, batch: MicroBatch) -> dict[str, float]:
        """Decompose the mismatch of one micro-batch per rank; rank 0 writes the combined result.

        All ranks must call this together. Returns the metrics `decompose/*`.
        """
        config, start = self.recipe.diagnosis, monotonic()
        (captured,) = self.policy.runner.captured([batch])
        layers = self.model.moe_layer_numbers
        most = config.decompose_layers
        found = decompose(self.policy, batch, captured, layers, most, self._quantized())
        if self.mesh.rank == 0:
            self.folder.diagnosis.mkdir(exist_ok=True)
            text = json.dumps({"step": step, **found.as_json()}, allow_nan=False)
            # The write is atomic, because `mrl why` and `mrl view` may read the file at any time.
            write_whole(self.folder.diagnosis_file(step), text + "\n")
            self._say_long(step, monotonic() - start)
        return found.metrics()

    def _say_long(self, step: int, seconds: float) -> None:
        """Print, once in a run, how to shorten decompositions that take longer than `LONG_S`."""
        if seconds <= LONG_S or self._said_long:
            return
        self._said_long = True
        config = self.recipe.diagnosis
        console.note(
            f"step {step}: {seconds:.0f} s of this step went into the decomposition of the mismatch, "
            f"which every {config.decompose_every} steps have; a smaller diagnosis.decompose_layers "
            f"(now {config.decompose_layers}) or a larger diagnosis.decompose_every takes less"
        )
