"""The rules of multi-token-prediction (MTP) layers, and the architecture of a model that trains them.

MTP layer k, from 0, predicts the token k + 2 places ahead of a row from the row's hidden state and the
embeddings of the tokens between (arXiv 2412.19437 section 2.2). It has norms of both, a projection of
their concatenation, a decoder layer and a last norm. Embedding and output layer are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.architectures.common import HF_LAYER, LAYER

MTP = "mtp."
"""The prefix of the names of all parameters of MTP layers in Megatron."""
MTP_LAYER = f"{MTP}layers.{{layer}}"
INNER_LAYER = f"{MTP_LAYER}.transformer_layer"
"""The decoder layer in an MTP layer."""


def mtp_rules(
    decoder: Iterable[Rule],
    layers: tuple[int, ...],
    own: Mapping[str, str],
    hf_layer: str = HF_LAYER,
) -> list[Rule]:
    """Return the rules of the MTP layers with the 0-based indices `layers`.

    `decoder` are the rules of a model; those of a decoder layer with experts become those of the MTP
    layers' decoder layer. `own` maps the other modules of an MTP layer to their HF names. Megatron
    names them `enorm` and `hnorm` (the norms of embedding and hidden state), `eh_proj` (the projection
    of the two, the embedding first) and `final_layernorm` (before the output). `hf_layer` is the prefix
    of the MTP layers' decoder layers in HF names.
    """
    table = [Rule(f"{MTP_LAYER}.{name}.weight", (hf,), layers=layers) for name, hf in own.items()]
    dense = f"{LAYER}.mlp.linear_"
    for rule in decoder:
        if rule.megatron.startswith(LAYER) and not rule.megatron.startswith(dense):
            megatron = rule.megatron.replace(LAYER, INNER_LAYER)
            hf = tuple(name.replace(HF_LAYER, hf_layer) for name in rule.hf)
            table.append(replace(rule, megatron=megatron, hf=hf, layers=layers))
    return table


def as_decoder_layer(megatron: str) -> str:
    """Return a rule's Megatron name, with an MTP layer's decoder layer as one of the model's."""
    return megatron.replace(INNER_LAYER, LAYER)


def training_mtp(architecture: Architecture, hf: HfConfig) -> Architecture:
    """Return the architecture of a model whose MTP layers are read and trained like the rest.

    `architecture.mtp` must have at least one layer for the parsed config.json `hf`.
    """
    mtp = architecture.mtp
    assert mtp is not None

    def rules(hf: HfConfig) -> list[Rule]:
        return [*architecture.rules(hf), *mtp.rules(hf)]

    def unread(hf: HfConfig) -> dict[str, str]:
        names = tuple(
            name.format(layer=layer, expert=0)
            for rule in mtp.rules(hf)
            for name in rule.hf
            for layer in rule.layers or ()
        )
        found = architecture.unread(hf).items()
        return {start: why for start, why in found if not any(n.startswith(start) for n in names)}

    return replace(architecture, rules=rules, unread=unread, num_trained_mtp=mtp.num(hf))
