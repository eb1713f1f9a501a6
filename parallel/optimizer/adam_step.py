"""Settings of Adam that replace those of the recipe in one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NO_CLIPPING = 1e30
"""A clipping threshold that is never reached. It is used because Megatron reports the gradient norm
only if it clips."""


@dataclass(frozen=True)
class AdamStep:
    """The settings of one step. None keeps what the recipe and its schedule say."""

    lr: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    """Decoupled weight decay. Parameters that the recipe does not decay are not decayed."""
    clip_grad: float | None = None
    """The largest norm of the gradient; 0 does not clip."""

    @contextmanager
    def applied(self, optimizer: Any) -> Iterator[None]:
        """Let `optimizer`, Megatron's, have these settings inside the block. Afterwards it has its own
        again, even after an error."""
        groups = list(optimizer.param_groups)
        before = [{key: group.get(key) for key in _KEYS if key in group} for group in groups]
        parts = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
        configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
        clips = {key: config.clip_grad for key, config in configs.items()}
        try:
            for group in groups:
                self._change(group)
            if self.clip_grad is not None:
                for config in configs.values():
                    config.clip_grad = self.clip_grad or NO_CLIPPING
            yield
        finally:
            for group, kept in zip(groups, before, strict=True):
                group.update(kept)
            for key, config in configs.items():
                config.clip_grad = clips[key]

    def _change(self, group: dict[str, Any]) -> None:
        """Put the settings into one of the optimizer's groups of parameters."""
        if self.lr is not None:
            group["lr"] = self.lr
        if self.beta1 is not None or self.beta2 is not None:
            first, second = group["betas"]
            group["betas"] = (
                first if self.beta1 is None else self.beta1,
                second if self.beta2 is None else self.beta2,
            )
        if self.eps is not None:
            group["eps"] = self.eps
        if self.weight_decay is not None:
            group["weight_decay"] = self.weight_decay * group.get("wd_mult", 1.0)


_KEYS = ("lr", "betas", "eps", "weight_decay")
