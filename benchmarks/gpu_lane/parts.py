"""This module runs one part of run.py in a process of its own:
`python -m benchmarks.gpu_lane.parts NAME ...`.

A part is a function `NAME(folder, device)` of the module that catalog.py gives it. It may write figures
at any time (`note`), and returns the last of them; `says` among them is the part's plain line.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from benchmarks.gpu_lane.catalog import BY_NAME
from benchmarks.gpu_lane.run import FIGURES
from mrl.engines.sglang.arguments import field_names

RECIPE = str(Path(__file__).parents[2] / "launch" / "recipes" / "toy_moe.yaml")
GPU_MODEL = {
    "vocab_size": 8192, "num_layers": 12, "hidden_size": 1024, "intermediate_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 384, "max_position_embeddings": 2048,
    "init_std": 0.02,
}  # fmt: skip
"""0.5 B parameters: 1.0 GB in bfloat16."""
GPU_ARGS: dict[tuple[str, ...], object] = {
    ("attention_backend",): "triton",  # FA3's and flashinfer's kernels are not among the pieces
    ("moe_runner_backend",): "triton",
    ("grammar_backend",): "none",
    # A start of 0.5.12 on 80 GB would capture 36 graphs of decoding and 58 of prefill.
    ("cuda_graph_max_bs", "cuda_graph_max_bs_decode"): 8,
    ("disable_piecewise_cuda_graph", "disable_prefill_cuda_graph"): True,
}
"""SGLang's arguments on GPUs: each with its name in 0.5.12 and, where it has another, in later ones."""
FP8_ARGS: dict[tuple[str, ...], object] = {
    ("fp8_gemm_runner_backend",): "triton",  # DeepGEMM compiles for minutes on first use
}
"""More of them, for engines with fp8 weights."""


def gpu_args(*, fp8: bool = False) -> dict[str, object]:
    """Return GPU_ARGS, and with `fp8` FP8_ARGS too, under the names of the installed SGLang. Raises
    RuntimeError for one that it lacks."""
    known = field_names()
    found: dict[str, object] = {}
    for names, value in (GPU_ARGS | (FP8_ARGS if fp8 else {})).items():
        name = next((name for name in names if name in known), None)
        if name is None:
            raise RuntimeError(
                f"ServerArgs of the installed SGLang has no field {' or '.join(names)}; add its name "
                "to GPU_ARGS in benchmarks/gpu_lane/parts.py"
            )
        found[name] = value
    return found


def note(**figures: object) -> None:
    """Put figures into the log, from where the driver takes them even if the part dies later."""
    print(FIGURES + json.dumps(figures), flush=True)


def model_folder(folder: Path, device: str) -> Path:
    """The model of all parts, written by the first that asks."""
    target, done = folder / "model", folder / "model.done"
    if not done.exists():
        from mrl.toy_model import write_toy_model

        write_toy_model(target, **(GPU_MODEL if device == "cuda" else {}))
        done.touch()
    return target


def train_overrides(folder: Path, device: str) -> list[str]:
    """Overrides of the toy recipe, for `train` and for its memory plan; writes the prompts."""
    data = folder / "data.jsonl"
    prompts = [{"prompt": chr(97 + i % 26) * (1 + i // 26)} for i in range(64)]
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    overrides = [
        f"model.path={model_folder(folder, device)}", "model.dtype=auto", f"data.path={data}",
        f"output_dir={folder / 'run'}", "train.num_steps=3", "optimizer.lr=1.0e-5",
    ]  # fmt: skip
    if device == "cuda":
        overrides += [
            "rollout.prompts_per_step=32", "rollout.samples_per_prompt=8",
            "rollout.max_response_len=128", "rollout.min_response_len=128",
            "rollout.max_total_tokens=262144", "rollout.mem_fraction_static=0.3",
            f"rollout.server_args={json.dumps(gpu_args())}", "train.micro_batch_tokens=16384",
        ]  # fmt: skip
    return overrides


def main() -> None:
    parser = argparse.ArgumentParser(description="One part of run.py.")
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="scratch space of all parts")
    options = parser.parse_args()
    module = importlib.import_module(f"benchmarks.gpu_lane.{BY_NAME[options.name].module}")
    note(**getattr(module, options.name)(options.folder, options.device))


if __name__ == "__main__":
    main()
