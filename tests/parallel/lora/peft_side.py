"""What PEFT makes of an adapter: `python -m tests.parallel.lora.peft_side FOLDER IN OUT`.

A process of its own: FOLDER, which holds PEFT and accelerate, is on its path. IN has the base model,
the samples, and either the folder of an adapter (which may be saved again) or the settings of a new
one, which is trained and saved. OUT gets log-probs and gradients.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor


def logprobs_of(model: Any, ids: Tensor, temperature: float) -> Tensor:
    """f32[T - 1]: of every token but the first."""
    logits = model(input_ids=ids[None]).logits[0] / temperature
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


def loss_of(model: Any, given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The negative sum of the log-probs that count, and all log-probs."""
    found = [logprobs_of(model, ids, given["temperature"]) for ids, _ in given["samples"]]
    counted = [
        (own * mask[1:]).sum() for own, (_, mask) in zip(found, given["samples"], strict=True)
    ]
    return -torch.stack(counted).sum(), [own.detach() for own in found]


def run(given: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(given["base"], dtype=torch.float32)
    if "folder" in given:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            model: Any = PeftModel.from_pretrained(base, given["folder"], is_trainable=True)
        if "save_again" in given:
            model.save_pretrained(given["save_again"])
    else:
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(**given["config"]))
        trained = [p for p in model.parameters() if p.requires_grad]
        adam = torch.optim.Adam(trained, lr=0.01)
        for _ in range(given["steps"]):
            adam.zero_grad()
            loss_of(model, given)[0].backward()
            adam.step()
        adam.zero_grad()
        model.save_pretrained(given["save"])
    loss, logprobs = loss_of(model, given)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs, "gradients": gradients}


if __name__ == "__main__":
    peft_folder, source, target = sys.argv[1:]
    sys.path.insert(0, peft_folder)
    torch.save(run(torch.load(source, weights_only=True)), target)
