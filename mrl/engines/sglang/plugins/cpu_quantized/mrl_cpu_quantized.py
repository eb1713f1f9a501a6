"""SGLang plugin for `rollout.quantization` on CPUs: computes what quantised layers compute on GPUs.

SGLang's quantised layers need GPUs or CPUs with AMX. Only CPU engines with quantised weights have this
plugin on their path. It does two things:

1. A bucket contains quantised weights and their scales. Here they are dequantised, and the engine holds
   the result in its own dtype.
2. On GPUs, the input of a quantised layer is quantised too: in fp8 with one scale per
   token and block of 128 inputs, in int8 with one scale per token. Here the inputs of the same layers
   are quantised and dequantised, and products are computed in the engine's dtype. A layer of experts
   has two such inputs, those of the first and of the second projection.

The products of a GPU differ from these by rounding only.

Dimensions: n tokens, K experts per token, E experts of this rank, H hidden size, I size of an expert.
"""

import os

import torch
import torch.nn.functional as F

from mrl.engines.sglang.compat import hook
from mrl.engines.sglang.quantized import engine_module
from mrl.quantization import SCHEMES

SCHEME = SCHEMES[os.environ["MRL_QUANTIZATION"]]
"""The format of the weights (`rollout.quantization`)."""


def register():
    hook("load_bucket", note_model, "BEFORE")
    hook("FlattenedTensorBucket.reconstruct_tensors", dequantize, "AROUND")
    hook("UnquantizedLinearMethod.apply", apply_linear, "AROUND")
    hook("moe_forward_native", run_experts, "AROUND")


MODULES = {}
"""The modules of the model, by name; empty before the first update."""


def note_model(updater, *args, **options):
    # 0.5.12 has a worker instead of the updater.
    model = updater.get_model() if hasattr(updater, "get_model") else updater.model_runner.model
    if not MODULES:
        MODULES.update(model.named_modules())


def dequantize(original, bucket):
    """Return the tensors of a bucket as pairs (name, tensor), without the scales and with the
    quantised tensors dequantised. Mark the modules that contain quantised tensors, so that their
    inputs are quantised, too."""
    tensors = dict(original(bucket))
    scales = {name: tensors.pop(name + SCHEME.suffix) for name in list(tensors)
              if name + SCHEME.suffix in tensors}  # fmt: skip
    for name, scale in scales.items():
        module = MODULES.get(engine_module(name))
        if module is None:
            raise RuntimeError(f"{name} is quantised, and no module {engine_module(name)} holds it")
        weight = getattr(module, "weight", None)
        weight = module.w13_weight if weight is None else weight
        tensors[name] = SCHEME.dequantize(tensors[name], scale, weight.dtype)
        module.mrl_quantized = True
    return list(tensors.items())


def apply_linear(original, method, layer, x, bias=None):
    if getattr(layer, "mrl_quantized", False):
        x = SCHEME.fake_quantize(x)
    return original(method, layer, x, bias)


def run_experts(original, layer, x, topk_output, moe_runner_config):
    """Compute the experts of a layer: x [n, H] -> [n, H], with SwiGLU."""
    if not getattr(layer, "mrl_quantized", False):
        return original(layer, x, topk_output, moe_runner_config)
    config = moe_runner_config
    if config.activation != "silu" or config.gemm1_alpha is not None:
        raise RuntimeError(
            f"rollout.quantization on CPUs: got experts with the activation {config.activation} "
            f"(alpha {config.gemm1_alpha}), expected SwiGLU"
        )
    weights, ids, _ = topk_output
    x = SCHEME.fake_quantize(x)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(len(layer.w13_weight)):  # under expert parallelism, -1 is on another rank
        tokens, place = torch.where(ids == expert)
        if not len(tokens):
            continue
        gate, up = F.linear(x[tokens], layer.w13_weight[expert]).chunk(2, dim=-1)
        inner = SCHEME.fake_quantize(F.silu(gate) * up)
        found = F.linear(inner, layer.w2_weight[expert]).float()
        out.index_add_(0, tokens, found * weights[tokens, place, None].float())
    return out.to(x.dtype)
