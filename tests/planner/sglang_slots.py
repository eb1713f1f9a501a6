"""How many elements SGLang's pool of adapters has on one rank.

A program of its own, with the CPU stubs on PYTHONPATH. It reads a list of cases from its input and
writes the number for each. Only the shapes are asked for; nothing is allocated.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig


def num_elements(case: dict[str, Any]) -> int:
    """Sum up A and B of all slots, as `LoRAMemoryPool.init_buffers` would make them."""
    from sglang.srt.lora.mem_pool import LoRAMemoryPool
    from sglang.srt.lora.utils import get_normalized_target_modules

    hf, ranks, ep = AutoConfig.for_model(**case["config"]), case["ranks"], case["ep"]
    pool = LoRAMemoryPool.__new__(LoRAMemoryPool)
    vars(pool).update(
        base_hf_config=hf, max_loras_per_batch=case["slots"], tp_size=ranks, attn_tp_size=ranks,
        moe_tp_size=ranks // ep, moe_ep_size=ep, moe_use_local_expert_ids=ep > 1,
        experts_shared_outer_loras=case["experts"] == "shared_outer",
    )  # fmt: skip
    model: Any = SimpleNamespace(config=hf, named_modules=list)  # no layers: sizes from the config
    modules = get_normalized_target_modules(case["modules"])
    for module in modules & {"gate_up_proj", "down_proj"}:
        modules.add(f"{module}_moe")
        if not getattr(hf, "n_shared_experts", 0):
            modules.remove(module)
    return sum(
        math.prod(make(module, model, case["rank"], layer))
        for make in (pool.get_lora_A_shape, pool.get_lora_B_shape)
        for module in modules
        for layer in range(hf.num_hidden_layers)
    )


if __name__ == "__main__":
    json.dump([num_elements(case) for case in json.load(sys.stdin)], sys.stdout)
