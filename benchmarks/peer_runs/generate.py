"""Generate with transformers: `python -m benchmarks.peer_runs.generate WORK.json OUT.json`.

One line of OUT for each step: seconds, tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Run the work of a file, and write what it took."""
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(work["seed"])
    model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(work["model"], padding_side="left")
    rows = [json.loads(line) for line in Path(work["data"]).read_text().splitlines()]
    steps = []
    for step in range(work["num_steps"]):
        first = step * work["prompts"] % (len(rows) - work["prompts"])
        texts = [row["prompt"] for row in rows[first : first + work["prompts"]]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        start = time.perf_counter()
        out = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=work["samples"],
            max_new_tokens=work["max_tokens"],
            min_new_tokens=work["min_tokens"],
        )
        seconds = time.perf_counter() - start
        answers = out[:, inputs["input_ids"].shape[1] :]
        steps.append(
            {"generate_s": seconds, "tokens": int((answers != tokenizer.pad_token_id).sum())}
        )
    Path(sys.argv[2]).write_text(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
