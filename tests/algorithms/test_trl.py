"""Our losses and gradients are TRL's, to 1e-6, wherever the definitions agree.

TRL's own GRPOTrainer._compute_loss runs in another process (trl_losses.py). docs/algorithms.md lists
where the definitions differ. Dimensions: B sequences, P prompt and T completion tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl.algorithms import load_algorithm
from mrl.config import AlgorithmConfig
from mrl.types import MicroBatch

B, P, T, V = 16, 2, 12, 11
FOLDER = Path(sys.prefix) / "trl"
SEQUENCE = {"importance_sampling_level": "sequence"}
NARROW = {"epsilon": 3e-4, "epsilon_high": 4e-4}
TIS = {"use_vllm": True}
K3 = {"beta": 0.04, "use_bias_correction_kl": False}
OPSM = ({"name": "opsm", "high": 0.02},)
RUNS: dict[str, tuple[dict, dict]] = {
    # name: (TRL's arguments, ours)
    "grpo": ({"loss_type": "grpo"}, {}),
    "grpo k3": ({"loss_type": "grpo"} | K3, {"kl_coef": 0.04}),
    "grpo delta": ({"loss_type": "grpo", "delta": 1.3}, {"dual_clip": 1.3}),
    "grpo tis": ({"loss_type": "grpo"} | TIS, {"importance": "tis"}),
    "grpo opsm": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.02},
        {"masks": OPSM},
    ),
    "grpo unbiased": (
        {"loss_type": "grpo", "beta": 0.04},
        {"kl_coef": 0.04, "kl_estimator": "k3_unbiased"},
    ),
    "grpo bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    "gspo": ({"loss_type": "grpo"} | SEQUENCE | NARROW, {}),
    "gspo k3": ({"loss_type": "grpo"} | K3 | SEQUENCE | NARROW, {"kl_coef": 0.04}),
    "gspo luspo": (
        {"loss_type": "luspo"} | SEQUENCE | NARROW,
        {"aggregation": "seq_mean_token_sum"},
    ),
    "gspo tis": ({"loss_type": "grpo"} | SEQUENCE | NARROW | TIS, {"importance": "tis"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"clip_high": 0.2}),
    "sapo": ({"loss_type": "sapo"}, {}),
}
OTHER_GRADIENT = ("gspo tis",)


def make_data() -> dict:
    rng = torch.Generator().manual_seed(5)
    ids = torch.randint(0, V, (B, P + T), generator=rng)
    logits = torch.randn(B, P + T, V, generator=rng)
    lengths = torch.tensor([12, 1, 7, 9, 12, 3, 5, 10] * 2)
    logprobs = logits[:, P - 1 : -1].log_softmax(-1).gather(-1, ids[:, P:, None]).squeeze(-1)

    def near(scale: float) -> Tensor:
        gap = torch.randn(B, T, generator=rng) + torch.randn(B, 1, generator=rng)
        return logprobs + scale * gap

    sampled, old = near(0.3), near(2e-4)
    old[::2] = near(0.3)[::2]  # half of the sequences within GSPO's range, half far out
    mask = torch.arange(T) < lengths[:, None]
    return {
        "logits": logits,
        "prompt_ids": ids[:, :P],
        "completion_ids": ids[:, P:],
        "prompt_mask": torch.ones(B, P, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": torch.randn(B, generator=rng),
        "old_per_token_logps": old,
        "ref_per_token_logps": near(0.3),
        "sampling_per_token_logps": sampled,
        # TRL makes this where it generates, its default mode apart: the weight of each token, capped.
        "importance_sampling_ratio": (old - sampled).exp().clamp(max=2.0) * mask,
        "num_items_in_batch": mask.sum(),
    }


pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def trl(tmp_path_factory) -> dict[str, tuple[Tensor, Tensor]]:
    """(loss, gradient by the logits) of every run, by TRL."""
    found = FOLDER.is_dir() or importlib.util.find_spec("trl") is not None
    if not found:
        pytest.skip(f"no TRL in {FOLDER}: `make test` installs it there")
    folder = tmp_path_factory.mktemp("trl")
    runs = {name: {"max_completion_length": T, **theirs} for name, (theirs, _) in RUNS.items()}
    torch.save(make_data() | {"runs": runs}, folder / "in.pt")
    command = [sys.executable, "-m", "tests.algorithms.trl_losses", str(FOLDER)]
    done = subprocess.run(
        [*command, str(folder / "in.pt"), str(folder / "out.pt")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt", weights_only=True)


def ours(name: str, options: dict) -> tuple[Tensor, Tensor]:
    data = make_data()
    logits = data["logits"].requires_grad_()
    mask = data["completion_mask"].bool()
    log_p = logits[:, P - 1 : -1].log_softmax(-1)
    logprobs = log_p.gather(-1, data["completion_ids"][..., None]).squeeze(-1)
    algorithm, config = load_algorithm(name), AlgorithmConfig(name=name, **options)
    counts = mask.sum(1)
    ids = torch.zeros(B * T, dtype=torch.long)
    batch = MicroBatch(
        input_ids=ids,
        position_ids=ids,
        cu_seqlens=torch.arange(0, B * T + 1, T).int(),
        loss_mask=mask.flatten(),
        rollout_logprobs=data["sampling_per_token_logps"].flatten(),
        rewards=data["advantages"],
        advantages=data["advantages"],
        seq_weight=algorithm.sequence_weights(counts, int(counts.sum()), B, config, T),
        old_logprobs=data["old_per_token_logps"].flatten(),
        ref_logprobs=data["ref_per_token_logps"].flatten(),
    )
    loss = algorithm.loss(logprobs.flatten(), batch, config).loss_sum
    return loss.detach(), torch.autograd.grad(loss, logits)[0].double()


@pytest.mark.parametrize("name", RUNS)
def test_values_and_gradients_are_trls(name, trl) -> None:
    loss, grad = ours(name.split()[0], RUNS[name][1])
    expected_loss, expected_grad = trl[name]
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    error = float((grad - expected_grad).abs().max() / expected_grad.abs().max())
    if name in OTHER_GRADIENT:  # docs/algorithms.md says why
        assert error > 1e-2
    else:
        assert error < 1e-6


def test_the_runs_differ_from_each_other(trl) -> None:
    """Each option did something: no two runs have the same loss but those that should."""
    losses = {name: round(float(loss), 9) for name, (loss, _) in trl.items()}
    assert len(set(losses.values())) == len(losses)
