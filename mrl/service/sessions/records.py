"""Writes samples of a session to its run folder, for the page that shows the run. Only rank 0 uses
this module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mrl.diagnosis.tokens import TokenRecord, save_tokens
from mrl.run.folder import RunFolder, as_lines
from mrl.service.sessions.bodies import ForwardBackwardBody, SampleBody
from mrl.service.tokenizer import ServiceTokenizer

MAX_SAMPLES = 64
"""Maximum number of answers that are kept for each version of the weights; later answers are not
kept."""


@dataclass
class _Kept:
    """An answer that is kept. `advantages` and `old_logprobs` are None until a forward_backward
    trains on the answer with the same version of the weights. The first such operation sets them."""

    source: str
    prompt_number: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    advantages: list[float] | None = None
    old_logprobs: list[float] | None = None


class SampleRecords:
    """Keeps the first answers that the current version of the weights sampled, and writes them to
    `rollouts/` and `tokens/` of the run folder."""

    def __init__(self, folder: RunFolder, tokenizer: ServiceTokenizer, temperature: float) -> None:
        self._folder, self._tokenizer, self._temperature = folder, tokenizer, temperature
        self._version = -1
        self._number = 0
        """The number of answers that the current version sampled, including answers that are not
        kept."""
        self._kept: dict[str, _Kept] = {}

    def add(self, version: int, body: SampleBody, result: Mapping[str, Any]) -> None:
        """Keep the answers of a `sample` operation, at most MAX_SAMPLES for each version, and write
        them. Raises OSError."""
        if version != self._version:
            self._version, self._number, self._kept = version, 0, {}
        before = len(self._kept)
        for number, (prompt, answers) in enumerate(
            zip(body.prompts, result["samples"], strict=True)
        ):
            for each in answers:
                self._number += 1
                if len(self._kept) < MAX_SAMPLES:
                    self._kept[each["id"]] = _Kept(
                        each["id"].partition("/")[0],
                        number,
                        prompt,
                        each["tokens"],
                        each["logprobs"],
                        each["stop_reason"],
                    )
        if len(self._kept) > before:
            self._write()

    def train(self, version: int, body: ForwardBackwardBody, result: Mapping[str, Any]) -> None:
        """Store the advantages and the trainer's log-probs of kept answers that a forward_backward
        has trained on. Does nothing if `version` is not that of the kept answers. A sequence that names
        an answer but has other tokens or targets is left out. Raises OSError."""
        if version != self._version:
            return
        has_new = False
        for each, logprobs in zip(body.sequences, result["logprobs"], strict=True):
            kept = self._kept.get(each.sample or "")
            if kept is None or each.tokens != [*kept.prompt, *kept.tokens]:
                continue
            if each.targets is not None and each.targets[1:] != each.tokens[1:]:
                continue
            if kept.advantages is None and each.advantages is not None:
                kept.advantages = each.advantages
                kept.old_logprobs = torch.as_tensor(logprobs).tolist()
                has_new = True
        if has_new:
            self._write()

    def _write(self) -> None:
        rows = [self._row(each) for each in self._kept.values()]
        self._folder.write_rollouts(self._version, as_lines(rows))
        path = self._folder.tokens / f"step_{self._version:06d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_tokens(path, self._record())

    def _row(self, kept: _Kept) -> dict[str, Any]:
        """Return an answer as a row of `rollouts/step_*.jsonl`. The reward is None, because only
        the client knows it."""
        trained = [a for a in kept.advantages or [] if a]
        return {
            "group_id": kept.prompt_number,
            "prompt_id": str(kept.prompt_number),
            "source": kept.source,
            "prompt": self._tokenizer.text(kept.prompt),
            "completion": self._tokenizer.text(kept.tokens),
            "reward": None,
            "advantage": trained[0] if trained else None,
            "weight_version": self._version,
            "staleness": 0,
            "prompt_len": len(kept.prompt),
            "response_len": len(kept.tokens),
            "finish_reason": kept.finish_reason,
        }

    def _record(self) -> TokenRecord:
        """Return the token record of the kept answers, prompts included. `old_logprobs` is NaN for
        answers that were not trained on."""
        ids: list[int] = []
        lengths, sampled, old, advantages, versions = [0], [], [], [], []
        for each in self._kept.values():
            num_prompt, num_tokens = len(each.prompt), len(each.prompt) + len(each.tokens)
            ids += [*each.prompt, *each.tokens]
            lengths.append(len(ids))
            sampled += [0.0] * num_prompt + each.logprobs
            old += each.old_logprobs or [math.nan] * num_tokens
            advantages += each.advantages or [0.0] * num_tokens
            versions += [-1] * num_prompt + [self._version] * len(each.tokens)
        known = torch.tensor(advantages, dtype=torch.float32)
        return TokenRecord(
            step=self._version,
            version=self._version,
            temperature=self._temperature,
            routing_replay="off",
            layer_numbers=(),
            num_experts=0,
            num_samples_of_step=self._number,
            sample_ids=torch.arange(len(self._kept)),
            cu_seqlens=torch.tensor(lengths),
            token_ids=torch.tensor(ids),
            loss_mask=known != 0,
            rollout_logprobs=torch.tensor(sampled, dtype=torch.float32),
            old_logprobs=torch.tensor(old, dtype=torch.float32),
            entropy=torch.full((len(ids),), math.nan),
            advantages=known,
            weight_versions=torch.tensor(versions, dtype=torch.int32),
            pieces=self._tokenizer.pieces(sorted(set(ids))),
        )
