"""This module compares shared prefixes with their peers: `python -m benchmarks.prefix_peers`.

    make .venv/.peers      # installs prefix-grouper, which verl uses, beside TRL

One process with one thread trains a dense Qwen3 of 4 layers with random weights, in float32, on the
same samples in four ways, by turns:

- `off` and `auto`: mrl with `train.share_prefixes` off and auto;
- `whole`: transformers on whole sequences, with the logits of the answers alone, as TRL's GRPOTrainer;
- `grouper`: transformers with prefix-grouper's attention, which computes a prompt once.

A step is the log-probs before the update, then forward, backward with recompute and an AdamW step whose
learning rate is so small that no step changes the weights. All use PyTorch's `sdpa` attention. A
micro-batch has at most BUDGET rows; prefix-grouper takes a prompt with all its samples. The answers'
log-probs must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import between_markers, finish, summary, write_result
from benchmarks.peers import PACKAGES
from benchmarks.shared_prefixes import BUDGET, Case, Steps, make_samples, measured
from moe.routes import Replay
from mrl.types import Sample
from parallel import prepare
from parallel.dims import ParallelDims
from parallel.mesh import destroy_mesh, init_mesh

LOWER_RIGHT = "lower_right_sdpa"
DOCUMENT = ROOT / "docs/prefixes.md"
TOLERANCE = 1e-4
LR = 1e-30
SIZES: dict[str, Any] = {
    "vocab_size": 128, "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": 98, "pad_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
CASES = (
    Case("named", 2048, 256, 8),
    Case("even", 512, 512, 4),
    Case("short prompts", 128, 512, 8),
)


def dense_samples(case: Case) -> list[Sample]:
    """Make samples of random tokens, without routes."""
    sizes = {"num_layers": 1, "num_experts": 1, "num_experts_per_tok": 1}
    return make_samples(case, {**sizes, "vocab_size": SIZES["vocab_size"]}, with_routes=False)


class Whole:
    """transformers on whole sequences, in micro-batches of at most BUDGET tokens."""

    attention = "sdpa"

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=self.attention
        )
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)

    def step(self, samples: list[Sample]) -> Tensor:
        """Take a step on samples of one prompt and one length."""
        ids = torch.stack([sample.token_ids for sample in samples])
        prompt_len = samples[0].prompt_len
        parts = self.parts(ids)
        with torch.no_grad():
            before = [self.logprobs(part, prompt_len) for part in parts]
        for part, old, start in zip(parts, before, range(0, len(ids), len(parts[0])), strict=True):
            signs = torch.tensor([(-1.0) ** (start + row) for row in range(len(part))])
            ratio = (self.logprobs(part, prompt_len) - old).mean(1).exp()
            (-(ratio * signs).sum() / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.cat(before).flatten()

    def parts(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the samples i64[n, T] of each micro-batch."""
        return ids.split(max(1, BUDGET // ids.shape[1]))

    def logprobs(self, ids: Tensor, prompt_len: int) -> Tensor:
        """Return the answers' log-probs f32[n, R]."""
        answers = ids[:, prompt_len:]
        out = self.model(ids, use_cache=False, logits_to_keep=answers.shape[1] + 1)
        return picked(out.logits[:, :-1], answers)


class Grouper(Whole):
    """The same with prefix-grouper: one row of a prompt and all its answers."""

    attention = "prefix_grouper_attention"

    def parts(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return all samples as one micro-batch."""
        return (ids,)

    def logprobs(self, ids: Tensor, prompt_len: int) -> Tensor:
        """Return the answers' log-probs f32[n, R]."""
        from prefix_grouper import PrefixGrouper

        prompt, answers = ids[:1, :prompt_len], ids[:, prompt_len:]
        masks = torch.ones_like(prompt), torch.ones_like(answers)
        grouper = PrefixGrouper.from_ungrouped_masks(
            *masks, group_sizes=len(ids), padding_mode="right"
        )
        own = torch.arange(prompt_len, ids.shape[1]).repeat(len(ids))
        out = self.model(
            grouper.concat_input(prompt, masks[0], answers, masks[1]),
            position_ids=torch.cat([torch.arange(prompt_len), own])[None],
            use_cache=False,
            prefix_grouper=grouper,
            prefix_grouper_attn_func=LOWER_RIGHT,
        )
        _, _, logits, _ = grouper.split_output(out.logits, include_prefix_last=1)
        return picked(logits[:, :-1], answers)


def lower_right_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attend to all keys up to a query's own, where the last query has the last key, as
    flash-attention does and transformers' `sdpa` does not. Heads are in dimension 1; `mask`, of
    padding, must be all true."""
    assert bool(mask.all())
    queries, keys = query.shape[2], key.shape[2]
    seen = None
    if queries < keys:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    out = scaled_dot_product_attention(
        query, key, value, seen, is_causal=seen is None, scale=options["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def picked(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probs f32[n, R] of the tokens."""
    return -cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)


def compare(sides: dict[str, Callable[[list[Sample]], Tensor]], case: Case, turns: int) -> dict:
    """Take steps by turns; the first of each side is not counted."""
    samples = dense_samples(case)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    results: dict[str, Tensor] = {}
    for turn in range(turns + 1):
        for name in sorted(sides, reverse=bool(turn % 2)):
            results[name], figures = measured(
                lambda name=name: sides[name](samples), torch.device("cpu")
            )
            if turn:
                found[name].append(figures)
    medians = {
        name: {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
        for name, rows in found.items()
    }
    apart = {
        name: float((each - results["off"]).abs().max())
        for name, each in results.items()
        if name != "off"
    }
    return {
        "name": case.name,
        "prompt_len": case.prompt_len,
        "response_len": case.response_len,
        "num_samples": case.num_samples,
        "sides": medians,
        "gain": {
            shared: round(medians[alone]["cpu_s"] / medians[shared]["cpu_s"], 3)
            for shared, alone in (("auto", "off"), ("grouper", "whole"))
            if shared in medians
        },
        "mrl_over": {
            name: round(medians["auto"]["cpu_s"] / medians[name]["cpu_s"], 3)
            for name in ("whole", "grouper")
            if name in medians
        },
        "largest_logprob_difference": apart,
    }


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the table of the result."""
    del name
    lines = [
        "| prompt | answer | samples | mrl, `off` | mrl, `auto` | whole sequences, as TRL "
        "| prefix-grouper | mrl over prefix-grouper |",
        "|---" * 8 + "|",
    ]
    for case in result["cases"]:
        sides = (
            f"{side['wall_s']:.1f} s, {side['peak_mb']:.0f} MB"
            for side in (case["sides"][key] for key in ("off", "auto", "whole", "grouper"))
        )
        shape = (f"{case[key]:,}" for key in ("prompt_len", "response_len", "num_samples"))
        cells = (*shape, *sides, f"{case['mrl_over']['grouper']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return {DOCUMENT: between_markers(DOCUMENT.read_text(), "peers", "\n".join(lines))}


def main() -> None:
    """Compare the sides, print a line for each case and write the result."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="folder of prefix-grouper")
    parser.add_argument("--only", default="", help="one case; writes nothing")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in ("", case.name)]
    if not cases or options.turns < 1:
        parser.error(f"expected --turns >= 1, and --only one of {[case.name for case in CASES]}")
    if not (options.packages / "prefix_grouper").is_dir():
        parser.error(
            f"--packages: {options.packages} has no prefix_grouper; run `make .venv/.peers`"
        )
    sys.path.append(str(options.packages))
    from prefix_grouper.utils.register_transformers import register_attention

    register_attention()
    AttentionInterface.register(LOWER_RIGHT, lower_right_sdpa)
    torch.set_num_threads(1)
    prepare()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).float().save_pretrained(folder)
        mesh = init_mesh(ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1), seed=0)
        try:
            steps = Steps(folder, mesh, replay=Replay.off)

            def ours(samples: list[Sample], *, share: bool) -> Tensor:
                found = steps.step(samples, share)["logprobs"]
                return found[torch.cat([sample.loss_mask for sample in samples])]

            sides = {
                "off": lambda samples: ours(samples, share=False),
                "auto": lambda samples: ours(samples, share=True),
                "whole": Whole(folder).step,
                "grouper": Grouper(folder).step,
            }
            for case in cases:
                rows.append(compare(sides, case, options.turns))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            destroy_mesh()
    failed = sum(max(r["largest_logprob_difference"].values()) > TOLERANCE for r in rows)
    if not options.only:
        content = {"budget": BUDGET, "model": SIZES, "cases": rows}
        write_result("prefix_peers", content, passed=len(rows) - failed, failed=failed,
                     packages=("torch", "transformers", "megatron-core"))  # fmt: skip
    finish(len(rows) - failed, failed)


if __name__ == "__main__":
    main()
