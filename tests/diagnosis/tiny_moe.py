"""A MoE language model in a few lines, and the token records that two copies of it would leave.

S samples of T tokens, H hidden, L MoE layers, E experts, K a token, V tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.diagnosis.tokens import TokenRecord

S, T, PROMPT, H, L, E, K, V = 48, 28, 4, 24, 3, 8, 2, 32


@dataclass(frozen=True)
class Model:
    """Each layer: a causal mean over the tokens so far, then K of E experts by softmax weights."""

    embedding: Tensor
    mixers: Tensor
    routers: Tensor
    experts: Tensor
    head: Tensor

    @staticmethod
    def make(seed: int = 0) -> Model:
        g = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64) / shape[-2] ** 0.5

        head = rand(1, H, V)[0] * 1.5
        return Model(rand(1, V, H)[0] * 5, rand(L, H, H), rand(L, H, E) * 2, rand(L, E, H, H), head)

    def perturbed(self, layer: int, expert: int, size: float, seed: int = 1) -> Model:
        """One expert with a relative change of `size`."""
        experts = self.experts.clone()
        noise = torch.randn(H, H, generator=torch.Generator().manual_seed(seed)).double() / H**0.5
        experts[layer, expert] += size * noise
        return dataclasses.replace(self, experts=experts)

    def forward(self, ids: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """ids i64[S, T] -> logits [S, T, V], native routes [S, T, L, K], margins [S, T, L]."""
        x = self.embedding[ids]
        count = torch.arange(1, ids.shape[1] + 1).view(1, -1, 1)
        routes, margins = [], []
        for layer in range(L):
            x = x + (x.cumsum(1) / count) @ self.mixers[layer]
            normed = torch.nn.functional.normalize(x, dim=-1) * H**0.5
            scores = normed @ self.routers[layer]
            top = scores.topk(K + 1)
            routes.append(top.indices[..., :K])
            margins.append(top.values[..., K - 1] - top.values[..., K])
            used = routes[-1] if forced is None else forced[:, :, layer]
            gates = scores.gather(-1, used).softmax(-1)
            every = torch.einsum("sth,ehj->stej", normed, self.experts[layer]).tanh()
            picked = every.gather(2, used.unsqueeze(-1).expand(*used.shape, H))
            x = x + (gates.unsqueeze(-1) * picked).sum(2)
        normed = torch.nn.functional.normalize(x, dim=-1) * H**0.5
        return normed @ self.head, torch.stack(routes, 2), torch.stack(margins, 2)

    def sample(self, temperature: float = 1.0, seed: int = 2) -> Tensor:
        """i64[S, T]: random prompts, continued."""
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(V, (S, PROMPT), generator=g)
        for _ in range(T - PROMPT):
            p = (self.forward(ids)[0][:, -1] / temperature).softmax(-1)
            ids = torch.cat([ids, p.multinomial(1, generator=g)], 1)
        return ids


def make_record(
    trainer: Model,
    engine: Model,
    *,
    temperature: float = 1.0,
    engine_temperature: float | None = None,
    reported_only: bool = False,
    route_shift: int = 0,
    noise: float = 0.0,
) -> TokenRecord:
    """`engine` samples, `trainer` replays its routes. `reported_only`: the engine samples at the right
    temperature and reports log-probs of the other. `noise`: of the engine's logits."""
    theirs = temperature if engine_temperature is None else engine_temperature
    ids = engine.sample(temperature if reported_only else theirs)
    logits, captured, _ = engine.forward(ids)
    g = torch.Generator().manual_seed(3)
    logits = logits + noise * torch.randn(logits.shape, generator=g, dtype=torch.float64)
    rollout = _logprobs(logits / theirs, ids)
    captured = captured.roll(route_shift, 1)
    mine, native, margins = trainer.forward(ids, captured)
    mine = mine / temperature
    p = mine.softmax(-1)
    entropy = torch.zeros(S, T).double()
    entropy[:, 1:] = -(p * p.log()).sum(-1)[:, :-1]
    mask = torch.zeros(S, T, dtype=torch.bool)
    mask[:, PROMPT:] = True
    captured, native = captured.short(), native.short()
    captured[:, -1] = -1  # the last token was never fed back

    def flat(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0).flatten().float()

    return TokenRecord(
        step=3,
        version=3,
        temperature=temperature,
        routing_replay="r3",
        layer_numbers=tuple(range(1, L + 1)),
        num_experts=E,
        num_samples_of_step=S,
        sample_ids=torch.arange(S),
        cu_seqlens=torch.arange(S + 1) * T,
        token_ids=ids.flatten(),
        loss_mask=mask.flatten(),
        rollout_logprobs=flat(rollout),
        old_logprobs=flat(_logprobs(mine, ids)),
        entropy=flat(entropy),
        advantages=flat(torch.ones(S, T)),
        weight_versions=torch.where(mask.flatten(), 3, -1).int(),
        expert_ids=captured.flatten(0, 1),
        native_ids=native.flatten(0, 1),
        margins=margins.flatten(0, 1).float(),
        pieces={i: chr(97 + i) for i in range(V)},
    )


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """[S, T]: index t is of token t."""
    rows = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.cat([torch.zeros(len(ids), 1).double(), rows], 1)
