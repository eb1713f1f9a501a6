"""This module has the cases of `policy_loss`: B sequences of T tokens each, a quarter of it prompt.

Equal lengths are the best case of padded code, which then pads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_bench import eager, peers
from benchmarks.kernel_bench.case import NOT_COMPILED, Case, Outputs, Run, Work, compile_static
from benchmarks.kernel_bench.eager import LossSettings, Padded
from mrl.kernels import POLICY_STATS, Clip, ImportanceWeight, KlPenalty, oracle, policy_loss

VARIANTS = {
    "grpo": LossSettings("token", "ppo", 0.2, 0.2),
    "gspo": LossSettings("sequence", "ppo", 3e-4, 4e-4),
    "gspo+tis+k3": LossSettings("sequence", "ppo", 3e-4, 4e-4, truncate=2.0, kl_coef=0.04),
    "cispo": LossSettings("token", "cispo", 1.0, 0.2),
    "sapo": LossSettings("token", "sapo", tau_positive=1.0, tau_negative=1.05),
}
# Eager's k3 of small ratios is what cancellation in fp32 leaves of it.
TOLERANCE = {"loss": 1e-5, "grad": 1e-5, "stats": 1e-5, "eager_stats": 2e-3}


@dataclass
class Batch:
    """A batch is packed, its fields in the order of `policy_loss`; N = B T."""

    logprobs: Tensor  # f32[N]
    old_logprobs: Tensor  # f32[N]
    loss_mask: Tensor  # bool[N]
    cu_seqlens: Tensor  # i32[B + 1]
    advantages: Tensor  # f32[B]
    seq_weight: Tensor  # f32[B]
    rollout: Tensor | None
    ref: Tensor | None

    def positional(self) -> list[Tensor]:
        return list(vars(self).values())[1:6]

    def padded(self) -> Padded:
        shape = (self.advantages.numel(), -1)
        return Padded(
            self.old_logprobs.view(shape),
            self.loss_mask.view(shape).float(),
            None if self.rollout is None else self.rollout.view(shape),
            None if self.ref is None else self.ref.view(shape),
            self.advantages[:, None],
            self.seq_weight,
        )


def make_batch(num_sequences: int, length: int, settings: LossSettings) -> Batch:
    """Make a batch on the CPU. No ratio lies so near a bound that fp32 could see it on the other
    side of it: there the gradient jumps, and the comparison with fp64 would show no error of the
    code."""
    rng = torch.Generator().manual_seed(0)
    shape = (num_sequences, length)
    sequence = settings.ratio == "sequence"
    mask = (torch.arange(length) >= length // 4).expand(shape).contiguous()
    num_loss_tokens = int(mask[0].sum())
    # Per-sequence means of log-ratios about as wide as GSPO's clip range, else PPO's.
    spread = 3e-4 * num_loss_tokens**0.5 if sequence else 0.2
    logprobs = -3 * torch.rand(shape, generator=rng)
    old = logprobs - spread * torch.randn(shape, generator=rng)
    bounds = torch.tensor([1.0 - settings.low, 1.0 + settings.high]).double().log()
    for _ in range(2):
        gap = logprobs.double() - old.double()
        if sequence:
            gap = torch.where(mask, gap, 0.0).sum(-1, keepdim=True) / num_loss_tokens
        near = (gap[..., None] - bounds).abs().amin(-1) < 2e-6
        old = torch.where(near, old + 1e-5, old)
    rollout = ref = None
    if settings.truncate is not None:
        # What bf16 leaves between engine and trainer, and one token in a thousand far off.
        shift = 0.02 * torch.randn(shape, generator=rng)
        shift = torch.where(torch.rand(shape, generator=rng) < 1e-3, 50 * shift, shift)
        limit = torch.tensor(settings.truncate).log()
        rollout = old - torch.where((shift - limit).abs() < 1e-5, shift + 1e-4, shift)
    if settings.kl_coef:
        ref = logprobs + 0.1 * torch.randn(shape, generator=rng)
    # A mean over sequences of means over tokens; `sequence` divides by the length itself.
    weight = 1.0 / (num_sequences * (1 if sequence else num_loss_tokens))
    return Batch(
        logprobs.flatten(),
        old.flatten(),
        mask.flatten(),
        torch.arange(0, num_sequences * length + 1, length, dtype=torch.int32),
        torch.randn(num_sequences, generator=rng),
        torch.full((num_sequences,), weight),
        None if rollout is None else rollout.flatten(),
        None if ref is None else ref.flatten(),
    )


def public_options(batch: Batch, settings: LossSettings) -> dict[str, Any]:
    """Return the keyword arguments of `policy_loss` and of its oracle."""
    if settings.clip == "sapo":
        taus = {"tau_positive": settings.tau_positive, "tau_negative": settings.tau_negative}
        clip = Clip("sapo", **taus)
    else:
        clip = Clip(settings.clip, low=settings.low, high=settings.high)  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"ratio": settings.ratio, "clip": clip}
    if settings.truncate is not None:
        options["rollout_logprobs"] = batch.rollout
        options["importance"] = ImportanceWeight("tis", "token", 0.0, settings.truncate)
    if settings.kl_coef:
        options["ref_logprobs"] = batch.ref
        options["kl"] = KlPenalty("k3", coef=settings.kl_coef)
    return options


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    settings = VARIANTS[case.variant]
    batch = make_batch(case.shape[0], case.shape[1], settings)
    moved = {name: value.to(device) for name, value in vars(batch).items() if value is not None}
    batch = Batch(**{"rollout": None, "ref": None, **moved})
    options = public_options(batch, settings)
    leaf = batch.logprobs.clone().requires_grad_()
    padded = batch.padded()
    padded_leaf = batch.logprobs.view(padded.old.shape).clone().requires_grad_()

    def fused() -> Outputs:
        result = policy_loss(leaf, *batch.positional(), **options)
        (grad,) = torch.autograd.grad(result.loss, leaf)
        return {"loss": result.loss.detach(), "grad": grad, "stats": result.stats}

    def expected() -> Outputs:
        exact = batch.logprobs.double().requires_grad_()
        result = oracle.policy_loss(exact, *batch.positional(), **options)
        (grad,) = torch.autograd.grad(result.loss, exact)
        found = {"loss": result.loss.detach(), "grad": grad}
        for output, names in (("stats", POLICY_STATS), ("eager_stats", eager.stat_names(settings))):
            values = [result.stats.get(name, 0.0) for name in names]
            found[output] = torch.tensor(values, dtype=torch.float64)
        return found

    def rival(function: Any) -> Run:
        def run() -> Outputs:
            loss, stats = function(padded_leaf, padded, settings)
            (grad,) = torch.autograd.grad(loss, padded_leaf)
            return {"loss": loss.detach(), "grad": grad.flatten(), "eager_stats": stats}

        return run

    floor = sum(t.nbytes for t in moved.values()) + leaf.nbytes
    compiled = compile_static(eager.policy_loss) if compile_ else None
    return Work(
        kernel=fused,
        eager=rival(eager.policy_loss),
        expected=expected,
        tolerance=TOLERANCE,
        floor_bytes=floor,
        compiled=rival(compiled) if compiled else NOT_COMPILED,
        liger=liger(batch, padded, padded_leaf, settings, compile_),
        trl=peers.TRL_POLICY_LOSS,
        elementwise=("stats", "eager_stats"),
    )


def liger(
    batch: Batch, padded: Padded, leaf: Tensor, settings: LossSettings, compile_: bool
) -> Run | str:
    """Liger's loss with the same normaliser: means over tokens, then over equal sequences.

    It computes one statistic (two with a KL penalty), and is given finished importance weights.
    """
    function = peers.liger_policy_loss()
    if isinstance(function, str):
        return function
    function = torch.compile(function, dynamic=False) if compile_ else function
    weight = None
    if padded.rollout is not None and settings.truncate is not None:
        weight = torch.exp(padded.old - padded.rollout).clamp(max=settings.truncate)

    def run() -> Outputs:
        loss, _ = function(
            leaf,
            padded.mask,
            batch.advantages,
            padded.mask,
            ref_per_token_logps=padded.ref,
            old_per_token_logps=padded.old,
            epsilon_low=settings.low,
            # CISPO's bound is the ratio itself there.
            epsilon_high=settings.high + (1.0 if settings.clip == "cispo" else 0.0),
            beta=settings.kl_coef,
            loss_type="grpo" if settings.clip == "ppo" else settings.clip,
            importance_sampling_level=settings.ratio,
            sapo_temperature_pos=settings.tau_positive,
            sapo_temperature_neg=settings.tau_negative,
            vllm_is_ratio=weight,
        )
        (grad,) = torch.autograd.grad(loss, leaf)
        return {"loss": loss.detach(), "grad": grad.flatten()}

    return run


def cases(quick: bool, cuda: bool) -> list[Case]:
    shapes = [(3, 40)] if quick else [(32, 1024), (256, 2048)]
    found = [
        Case("policy_loss", variant, shape, "float32", build, num_rounds=2 if quick else 25)
        for variant in VARIANTS
        for shape in shapes
    ]
    if not quick and not cuda:
        for variant in ("grpo", "gspo+tis+k3"):
            two = Case("policy_loss", variant, (256, 2048), "float32", build, 2, num_rounds=25)
            found.append(two)
        # Four times as many tokens, among which the fixed cost of a torch call is lost.
        found.append(Case("policy_loss", "gspo+tis+k3", (1024, 2048), "float32", build))
    return found
