"""Check the training of a checkpoint's multi-token-prediction (MTP) layers."""

from __future__ import annotations

import math

from mrl.config import Recipe
from mrl.errors import InputError
from parallel.hf_config import HfModel
from parallel.hf_tensors import WHOLE_ELEMENTS, HfTensors
from parallel.weight_checks import check_weights

KEY = "train.mtp_loss_scaling_factor"
NUM_SAMPLED_ROWS = 8


def with_mtp(recipe: Recipe, model: HfModel, *, deep: bool) -> HfModel:
    """Return `model` with its MTP layers among what is trained, if the recipe trains them.

    Raises InputError as `planned_mtp` does, if the weights of the layers are not there, and if they
    have an embedding or an output layer of their own. `deep`: read all their weights, not only a
    sample, to check that they are finite and that embedding and output layer are the model's.
    """
    trained, mtp = planned_mtp(recipe, model), model.architecture.mtp
    if not trained.architecture.num_trained_mtp or mtp is None:
        return model
    start = _start(recipe)
    with HfTensors(model) as tensors:
        first = mtp.rules(model.config)[0].hf[0].format(layer=model.sizes.num_layers)
        if first not in tensors:
            raise InputError(
                f"{start}, but {_lacking(model)} in its weights (no tensor {first}), as in a folder "
                f"that transformers saved; take the published one, or leave {KEY} out"
            )
        for name, original in mtp.copies(model.config).items():
            if not {name, original} <= tensors.names:
                continue
            if _differ(tensors, name, original, whole=deep):
                raise InputError(
                    f"{start}, but {name} of {model.path} differs from {original}; mrl trains MTP "
                    f"layers that share both with the model only; leave {KEY} out"
                )
    check_weights(trained, deep=deep)
    return trained


def planned_mtp(recipe: Recipe, model: HfModel) -> HfModel:
    """Return the same as `with_mtp`, from config.json alone.

    Raises InputError if the model has no MTP layers, and for settings under which they cannot be
    trained.
    """
    if not recipe.train.mtp_loss_scaling_factor:
        return model
    for is_set, text in (
        (recipe.lora is not None, "a LoRA adapter is trained, and MTP layers are never adapted"),
        (
            not recipe.train.logprob_chunk_tokens,
            "train.logprob_chunk_tokens is 0: the loss of MTP layers needs hidden states; give it a "
            "number of tokens, such as 1024",
        ),
    ):
        if is_set:
            raise InputError(f"{_start(recipe)}, but {text}, or leave {KEY} out")
    mtp = model.architecture.mtp
    if mtp is None and model.config.get("num_nextn_predict_layers"):
        raise InputError(
            f"{_start(recipe)}, but mrl does not train the multi-token-prediction layers of a "
            f"{model.architecture.model_type} model, and exports those of {model.path} as they are; "
            f"leave {KEY} out"
        )
    if mtp is None or not mtp.num(model.config):
        raise InputError(
            f"{_start(recipe)}, but {_lacking(model)} in its config.json; leave {KEY} out"
        )
    return model.training_mtp()


def _start(recipe: Recipe) -> str:
    return f"{KEY} is {recipe.train.mtp_loss_scaling_factor:g}"


def _lacking(model: HfModel) -> str:
    kind = model.architecture.model_type
    return f"the {kind} model {model.path} has no multi-token-prediction layers"


def _differ(tensors: HfTensors, name: str, original: str, *, whole: bool) -> bool:
    """Return whether two tensors with at least one dimension differ in their shapes or in a number.

    With `whole` all their rows are compared, which may take long. Otherwise NUM_SAMPLED_ROWS evenly
    spaced rows are; an embedding that was trained apart differs in nearly all of them.
    """
    shape = tensors.shape(name)
    if shape != tensors.shape(original):
        return True
    num_rows, step = shape[0], 1
    starts = sorted({(num_rows - 1) * n // (NUM_SAMPLED_ROWS - 1) for n in range(NUM_SAMPLED_ROWS)})
    if whole:
        step = max(1, WHOLE_ELEMENTS // max(1, math.prod(shape[1:])))
        starts = range(0, num_rows, step)
    for start in starts:
        ours, theirs = (
            tensors.rows(each, start, min(start + step, num_rows)) for each in (name, original)
        )
        if not bool((ours == theirs).all()):
            return True
    return False
