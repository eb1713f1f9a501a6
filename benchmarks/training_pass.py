"""This module times the demo's passes beside `transformers`: `python -m benchmarks.training_pass`.

One process with one thread holds the demo's policy twice: as mrl trains it (Megatron-core, packed
micro-batches, replayed routes, GSPO through the fused kernel) and as `Qwen3MoeForCausalLM` (the same
weights, the same samples in the same micro-batches padded to their longest, its default attention and
experts, GSPO in plain torch). Both do, by turns, on the same tokens:

logprob   the log-probs of all tokens, without gradients
train     forward, backward, gradient clipping and one step of Adam

The routes that mrl replays are those that `transformers` chooses, so that both compute the same
numbers: log-probs have to agree to 1e-4 and the gradient norm to 1e-3 before anything is timed.
Figures are medians of wall-clock seconds and of CPU seconds. A pass fails where mrl takes more than
1.5 times the CPU seconds of `transformers`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.evidence.result import finish, summary, write_result
from moe.routes import Replay
from mrl.algorithms.corrections import sequence_advantages
from mrl.config import Recipe, load_recipe
from mrl.learn.batching import make_train_batch
from mrl.preflight import Plan, check
from mrl.toy_model import write_toy_model
from mrl.types import MicroBatch, RoutingTrace, Sample, TrainBatch, VersionSpan
from parallel import prepare
from parallel.mesh import destroy_mesh, init_mesh

RECIPE = Path(__file__).parents[1] / "launch" / "recipes" / "toy_moe.yaml"
LIMIT = 1.5
LOGPROB_TOLERANCE = 1e-4
GRAD_NORM_TOLERANCE = 1e-3


def make_samples(plan: Plan, peer: Peer) -> list[Sample]:
    """Make a step of the demo: prompts of its file, random completions, the routes of
    `transformers`.
    """
    rollout = plan.recipe.rollout
    generator = torch.Generator().manual_seed(0)
    vocab_size: int = plan.model.config["vocab_size"]
    samples = []
    for group_id, prompt in enumerate(plan.prompts[: rollout.prompts_per_step]):
        for _ in range(rollout.samples_per_prompt):
            shape = (rollout.max_response_len,)
            response = torch.randint(0, vocab_size, shape, generator=generator)
            ids = torch.cat([prompt.token_ids, response])
            samples.append(_sample(plan, group_id, ids, len(prompt.token_ids), peer.routes(ids)))
    return samples


def _sample(plan: Plan, group_id: int, ids: Tensor, prompt_len: int, routes: Tensor) -> Sample:
    """`routes` u8[T-1, L, K]."""
    rows = VersionSpan(0, 0, len(ids) - 1)
    sizes = plan.model.sizes
    trace = RoutingTrace(routes, plan.model.moe_layer_numbers, sizes.num_experts, (rows,), 0)
    mask = torch.arange(len(ids)) >= prompt_len
    span = (VersionSpan(0, prompt_len, len(ids)),)
    zeros = torch.zeros(len(ids))
    return Sample(group_id, ids, prompt_len, mask, zeros, span, "length", trace)


@dataclass
class Peer:
    """The same model in `transformers`, trained as a plain loop over padded micro-batches would."""

    model: Any
    optimizer: torch.optim.Optimizer
    clip_grad: float
    topk: int

    @classmethod
    def load(cls, recipe: Recipe) -> Peer:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32)
        config = recipe.optimizer
        betas = (config.adam_beta1, config.adam_beta2)
        optimizer = torch.optim.AdamW(
            model.parameters(), config.lr, betas, config.adam_eps, config.weight_decay
        )
        return cls(model, optimizer, config.clip_grad, model.config.num_experts_per_tok)

    @torch.no_grad()
    def routes(self, ids: Tensor) -> Tensor:
        """Return u8[T-1, L, K], the experts that the model chooses for all but the last of `ids`
        i64[T].
        """
        found = self.model(ids.unsqueeze(0), output_router_logits=True).router_logits
        chosen = [logits.topk(self.topk).indices for logits in found]
        return torch.stack(chosen, dim=1)[:-1].to(torch.uint8)

    def logprobs(self, batch: PaddedBatch) -> Tensor:
        """Return the log-probs f32[B, S-1] of tokens 1 to S-1 of each row."""
        logits = self.model(batch.input_ids, attention_mask=batch.attention_mask).logits
        labels = batch.input_ids[:, 1:, None]
        return logits[:, :-1].float().log_softmax(-1).gather(2, labels).squeeze(2)

    @torch.no_grad()
    def logprob_pass(self, batches: Sequence[PaddedBatch]) -> list[Tensor]:
        return [self.logprobs(batch) for batch in batches]

    def train_pass(self, batches: Sequence[PaddedBatch], old: Sequence[Tensor]) -> float:
        """One optimizer step on the GSPO objective; returns the gradient norm before clipping."""
        for batch, before in zip(batches, old, strict=True):
            log_ratio = (self.logprobs(batch) - before) * batch.loss_mask
            ratio = (log_ratio.sum(1) / batch.loss_mask.sum(1)).exp()
            (-(batch.weight * ratio).sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


@dataclass(frozen=True)
class PaddedBatch:
    """A padded batch holds B samples of at most S tokens, padded on the right."""

    input_ids: Tensor
    """i64[B, S]."""
    attention_mask: Tensor
    """i64[B, S]."""
    loss_mask: Tensor
    """bool[B, S-1], of tokens 1 to S-1."""
    weight: Tensor
    """f32[B]: what a sample counts in the loss, times its advantage."""

    @classmethod
    def of(cls, batch: MicroBatch) -> PaddedBatch:
        sizes = batch.cu_seqlens.diff().tolist()
        ids, mask = list(batch.input_ids.split(sizes)), list(batch.loss_mask.split(sizes))
        ones = [torch.ones_like(row) for row in ids]
        return cls(
            pad_sequence(ids, batch_first=True),
            pad_sequence(ones, batch_first=True),
            pad_sequence(mask, batch_first=True)[:, 1:],
            batch.seq_weight * sequence_advantages(batch),
        )

    def packed(self, logprobs: Tensor) -> Tensor:
        """Pack f32[B, S-1] into f32[N] as mrl does: 0 off the loss tokens."""
        full = torch.nn.functional.pad(logprobs * self.loss_mask, (1, 0))
        return full[self.attention_mask.bool()]


@dataclass
class Ours:
    """The policy as the trainer drives it."""

    policy: Any
    loss: Callable[[Tensor, MicroBatch], Any]

    def logprob_pass(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return self.policy.forward_only(batches, Replay.rollout).logprobs

    def train_pass(self, batch: TrainBatch) -> float:
        return self.policy.train_step(batch, self.loss, Replay.rollout).grad_norm


def make_ours(plan: Plan, mesh: Any) -> Ours:
    from parallel.policy import Policy

    recipe = plan.recipe
    policy = Policy(
        plan.model,
        mesh,
        recipe.model,
        recipe.optimizer,
        recompute=recipe.train.recompute,
        temperature=recipe.rollout.temperature,
        moe=recipe.moe,
    )
    algorithm = plan.algorithm
    return Ours(policy, lambda logprobs, batch: algorithm.loss(logprobs, batch, recipe.algorithm))


def measure(plan: Plan, mesh: Any, num_pairs: int) -> dict[str, Any]:
    """Check that both compute the same, then time both passes by turns."""
    from parallel.policy import with_old_logprobs

    peer, ours = Peer.load(plan.recipe), make_ours(plan, mesh)
    samples = make_samples(plan, peer)
    advantages = torch.randn(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = plan.recipe.train.micro_batch_tokens
    config = plan.recipe.algorithm
    batch = make_train_batch(samples, advantages, plan.algorithm, mesh, tokens, config)
    padded = [PaddedBatch.of(micro) for micro in batch.micro_batches]
    old = peer.logprob_pass(padded)
    before = ours.policy.forward_only(batch.micro_batches, Replay.rollout)
    differences = [
        float((own - rows.packed(theirs)).abs().max())
        for own, rows, theirs in zip(before.logprobs, padded, old, strict=True)
    ]
    micro_batches = with_old_logprobs(batch.micro_batches, before)
    ready = TrainBatch(micro_batches, batch.num_loss_tokens, batch.num_samples)
    norms = ours.train_pass(ready), peer.train_pass(padded, old)
    agreement = {
        "largest_logprob_difference": max(differences),
        "relative_grad_norm_difference": abs(norms[0] / norms[1] - 1),
    }
    passes = {
        "logprob": (lambda: ours.logprob_pass(micro_batches), lambda: peer.logprob_pass(padded)),
        "train": (lambda: ours.train_pass(ready), lambda: peer.train_pass(padded, old)),
    }
    return {
        "tokens": sum(micro.num_tokens for micro in micro_batches),
        "micro_batches": len(micro_batches),
        "pairs": num_pairs,
        "experts_of_transformers": peer.model.config._experts_implementation,
        **agreement,
        "passes": {name: compare(*both, num_pairs=num_pairs) for name, both in passes.items()},
    }


def compare(
    ours: Callable[[], Any], theirs: Callable[[], Any], num_pairs: int
) -> dict[str, dict[str, float]]:
    """Return the medians of both, taken by turns; the first pair is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {"mrl": [], "transformers": []}
    for i in range(num_pairs + 1):
        turn = [("mrl", ours), ("transformers", theirs)]
        for name, run in reversed(turn) if i % 2 else turn:
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if i:
                seconds[name].append(took)
    table = {}
    for column, kind in enumerate(("wall_s", "cpu_s")):
        medians = {
            name: statistics.median(row[column] for row in rows) for name, rows in seconds.items()
        }
        ratio = medians["mrl"] / medians["transformers"]
        table[kind] = {**{n: round(m, 4) for n, m in medians.items()}, "ratio": round(ratio, 3)}
    return table


def failures(result: dict[str, Any]) -> list[str]:
    """Return what does not hold, one sentence each."""
    found = []
    if result["largest_logprob_difference"] > LOGPROB_TOLERANCE:
        found.append(f"log-probs differ by {result['largest_logprob_difference']:.1e}")
    if result["relative_grad_norm_difference"] > GRAD_NORM_TOLERANCE:
        found.append(f"gradient norms differ by {result['relative_grad_norm_difference']:.1e}")
    for name, table in result["passes"].items():
        ratio = table["cpu_s"]["ratio"]
        if ratio > LIMIT:
            found.append(f"{name}: {ratio} times the CPU seconds of transformers, above {LIMIT}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--pairs", type=int, default=15, help="timed turns of each pass")
    parser.add_argument("--output", type=Path, help="another file than the one in results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_toy_model(model)
        keys = [f"model.path={model}", f"output_dir={scratch}/run"]
        plan = check(load_recipe(RECIPE, keys), 1)
        try:
            result = measure(plan, init_mesh(plan.dims, plan.recipe.seed), args.pairs)
        finally:
            destroy_mesh()
    found = failures(result)
    num_checks = 2 + len(result["passes"])
    write_result(
        "training_pass",
        {"limit": LIMIT, **result},
        passed=num_checks - len(found),
        failed=len(found),
        packages=("torch", "megatron-core", "transformers"),
        path=args.output,
    )
    for line in found:
        print(f"FAILED {line}")
    print(json.dumps(result["passes"], indent=1))
    finish(num_checks - len(found), len(found))


if __name__ == "__main__":
    main()
