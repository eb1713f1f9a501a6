"""TRL's own losses on given inputs: `python -m tests.algorithms.trl_losses FOLDER IN OUT`.

A process of its own: FOLDER, which holds TRL and accelerate, is on its path, and `datasets`, `pandas`
and `pyarrow`, which TRL imports for what its losses do not touch, are empty modules in it.
Dimensions: B sequences, P prompt and T completion tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ABSENT = ("datasets", "pandas", "pyarrow", "pyarrow.compute", "pyarrow.types")


class StandIn(ModuleType):
    """A module whose every name is an empty class: enough to be imported from, and for annotations."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(name: str) -> None:
    """Make `name` importable, unless it is installed."""
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    module = StandIn(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module


class KnownLogits(torch.nn.Module):
    """A language model whose logits are its parameters, f64[B, P + T, V]."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        """What TRL's head gives: log-prob and entropy of each token, [B, P + T], off the row before."""
        log_p = torch.nn.functional.pad(self.logits.log_softmax(-1)[:, :-1], (0, 0, 1, 0))
        chosen = log_p.gather(-1, input_ids[..., None]).squeeze(-1)
        return SimpleNamespace(
            log_probs=torch.where(labels == -100, 0.0, chosen),
            entropy=-(log_p.exp() * log_p).sum(-1),
        )


def make_trainer(model: torch.nn.Module, options: dict[str, Any]) -> Any:
    """A GRPOTrainer with what `_compute_loss` reads, and with its real arguments' defaults."""
    from accelerate import Accelerator
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    args = GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, **options)
    trainer = object.__new__(GRPOTrainer)
    trainer.args, trainer.model, trainer.accelerator = args, model.eval(), Accelerator(cpu=True)
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    for name in (
        "beta", "loss_type", "importance_sampling_level", "max_completion_length", "use_vllm",
        "vllm_importance_sampling_correction", "off_policy_mask_threshold", "top_entropy_quantile",
    ):  # fmt: skip
        setattr(trainer, name, getattr(args, name))
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    return trainer


def main(folder: str, given: str, into: str) -> None:
    sys.path.insert(0, folder)
    for name in ABSENT:
        stand_in(name)
    data = torch.load(given, weights_only=True)
    results = {}
    for name, options in data.pop("runs").items():
        model = KnownLogits(data["logits"].double())
        trainer = make_trainer(model, options)
        inputs = {key: value for key, value in data.items() if key != "logits"}
        loss = trainer._compute_loss(model, inputs)
        (grad,) = torch.autograd.grad(loss, model.logits)
        results[name] = (loss.detach(), grad)
    torch.save(results, into)


if __name__ == "__main__":
    main(*sys.argv[1:])
