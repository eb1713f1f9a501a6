"""Tiny checkpoints with multi-token-prediction layers, and what transformers computes with them."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.expected_tensors import expected_shapes
from parallel.hf_config import HfModel
from tests.parallel.models import write_tiny

FILE = "mtp.safetensors"
FAMILIES = ("glm4_moe", "deepseek_v3", "qwen3_next")
OWN = {
    "qwen3_next": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "": tuple(f"model.layers.4.{n}" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
}
"""The published names of the norms of embedding and hidden state, the projection, and the last norm."""


def write_mtp(model_type: str, folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of `models.write_tiny`, with one MTP layer of random weights in a file of its
    own -> its folder."""
    write_tiny(model_type, folder, **changes)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in expected_shapes(HfModel.read(folder).training_mtp()):
        if name.startswith(("mtp.", "model.layers.4.")):
            tensors[name] = 0.15 * torch.randn(shape, generator=generator)
            if "norm" in name and model_type != "qwen3_next":  # whose norms add 1 to their weight
                tensors[name] += 1
    if model_type != "qwen3_next":
        given = load_file(folder / "model.safetensors")
        head = "lm_head.weight" if "lm_head.weight" in given else "model.embed_tokens.weight"
        tensors["model.layers.4.embed_tokens.weight"] = given["model.embed_tokens.weight"].clone()
        tensors["model.layers.4.shared_head.head.weight"] = given[head].clone()
    save_file(tensors, folder / FILE)
    return folder


def reference_logprobs(folder: Path, token_ids: Tensor, scratch: Path) -> Tensor:
    """f32[T-2]: what transformers' modules give for tokens 2 to T-1 of one sequence i64[T].

    transformers has no MTP layers. The MTP layer's decoder layer is loaded as the last layer of a
    model with one layer more; everything around it is computed here.
    """
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    config = json.loads((folder / "config.json").read_text())
    norms = OWN.get(config["model_type"], OWN[""])
    mtp = load_file(folder / FILE)
    enorm, hnorm, project, last = (mtp.pop(f"{name}.weight") for name in norms)
    longer = scratch / "longer"
    longer.mkdir()
    layers = [*config.get("layer_types", ()), "full_attention"]
    more = {"num_hidden_layers": 5, "num_nextn_predict_layers": 0}
    more |= {"layer_types": layers} if config["model_type"] == "qwen3_next" else {}
    (longer / "config.json").write_text(json.dumps(config | more))
    moved = {n.replace("mtp.layers.0.", "model.layers.4."): t for n, t in mtp.items()}
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    kept = {name: tensor for name, tensor in moved.items() if not name.endswith(copies)}
    save_file(load_file(folder / "model.safetensors") | kept, longer / "model.safetensors")
    model, found = auto.from_pretrained(longer, dtype=torch.float32, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    shutil.rmtree(longer)

    base = auto.from_pretrained(folder, dtype=torch.float32).model
    norm_of = type(base.norm)

    def norm(weight: Tensor, states: Tensor) -> Tensor:
        module = norm_of(len(weight), eps=config["rms_norm_eps"])
        module.weight.data = weight
        return module(states)

    with torch.no_grad():
        hidden = base(token_ids.unsqueeze(0)).last_hidden_state[:, :-1]  # after the last norm
        embedded = base.embed_tokens(token_ids[None, 1:])
        both = torch.cat((norm(enorm, embedded), norm(hnorm, hidden)), dim=-1)
        positions = torch.arange(both.shape[1]).unsqueeze(0)
        states = both @ project.T
        states = model.model.layers[4](
            states,
            position_embeddings=model.model.rotary_emb(states, positions),
            position_ids=positions,
            attention_mask=None,
        )
        states = states[0] if isinstance(states, tuple) else states
        logits = model.lm_head(norm(last, states))[0]
    return logits.log_softmax(-1)[:-1].gather(1, token_ids[2:, None])[:, 0]
