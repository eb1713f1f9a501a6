"""What a run measures and writes between the pass before the update and the update.

OUTPUT_DIR/tokens/step_*.safetensors and OUTPUT_DIR/diagnosis/step_*.json: on file before the step that
they describe can fail.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mrl.config import Recipe
from mrl.diagnosis.decompose import decompose
from mrl.diagnosis.gather import gather_tokens
from mrl.diagnosis.tokens import TokenRecord, save_tokens
from mrl.run.folder import RunFolder
from mrl.system.files import write_whole
from mrl.types import MicroBatch, Sample
from parallel.forward import Observe, PassOutput
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.policy import Policy


@dataclass
class Diagnosis:
    """This is the diagnosis of a run on one rank. `before_update` is a collective."""

    recipe: Recipe
    model: HfModel
    tokenizer: Any
    mesh: Mesh
    policy: Policy
    folder: RunFolder
    _pieces: dict[int, str] = field(default_factory=dict)

    def observe(self, step: int) -> Observe | None:
        """What the pass before the update has to keep of the routers."""
        if not self.recipe.captures_routes:
            return None
        return "rows" if self._saves_tokens(step) else "counts"

    def before_update(
        self,
        step: int,
        samples: Sequence[Sample],
        batches: Sequence[MicroBatch],
        old: PassOutput,
    ) -> dict[str, float]:
        """Write what is due -> `decompose/*` on the steps that decompose. Lets the rows of `old` go.

        `samples` of all ranks; `batches` of this one, with the log-probs of the pass `old`.
        """
        if self._saves_tokens(step):
            record = self.token_record(step, samples, batches, old)
            if record is not None:
                self.folder.tokens.mkdir(exist_ok=True)
                save_tokens(self.folder.token_file(step), record)
            old.observed.clear()
        if not self._decomposes(step):
            return {}
        every = self.recipe.diagnosis.decompose_every
        return self._decompose(step, batches[(step // every) % len(batches)])

    def is_due(self, step: int) -> bool:
        """Whether `before_update` has anything to do."""
        return self._saves_tokens(step) or self._decomposes(step)

    def _saves_tokens(self, step: int) -> bool:
        every = self.recipe.diagnosis.save_tokens_every
        return bool(every) and step % every == 0

    def _decomposes(self, step: int) -> bool:
        every = self.recipe.diagnosis.decompose_every
        return bool(every) and step % every == 0

    def token_record(
        self,
        step: int,
        samples: Sequence[Sample],
        batches: Sequence[MicroBatch],
        old: PassOutput,
    ) -> TokenRecord | None:
        """Make the token record on rank 0. A collective."""
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
        new = [i for i in token_ids if i not in self._pieces]
        if new:  # of an empty list, transformers gives one empty text
            texts = self.tokenizer.batch_decode([[i] for i in new])
            self._pieces |= dict(zip(new, texts, strict=True))
        return {i: self._pieces[i] for i in token_ids}

    def _decompose(self, step: int, batch: MicroBatch) -> dict[str, float]:
        config = self.recipe.diagnosis
        (captured,) = self.policy.runner.captured([batch])
        layers = self.model.moe_layer_numbers
        found = decompose(self.policy, batch, captured, layers, config.decompose_layers)
        if self.mesh.rank == 0:
            self.folder.diagnosis.mkdir(exist_ok=True)
            text = json.dumps({"step": step, **found.as_json()}, allow_nan=False)
            # Whole, as `mrl why` and `mrl view` may be reading.
            write_whole(self.folder.diagnosis_file(step), text + "\n")
        return found.metrics()
