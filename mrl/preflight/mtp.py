"""Check the training of a checkpoint's multi-token-prediction (MTP) layers."""

from __future__ import annotations

from mrl.config import Recipe
from mrl.errors import InputError
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors
from parallel.weight_checks import check_weights

KEY = "train.mtp_loss_scaling_factor"
SAMPLED_ROWS = 8


def with_mtp(recipe: Recipe, model: HfModel, *, deep: bool) -> HfModel:
    """Return `model` with its MTP layers among what is trained, if the recipe trains them.

    Raises InputError as `planned_mtp` does, if the weights of the layers are not there, and if they
    have an embedding or an output layer of their own. `deep`: check that all their weights are
    finite, not only a sample of them.
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
            if name in tensors and original in tensors and _differ(tensors, name, original):
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


def _differ(tensors: HfTensors, name: str, original: str) -> bool:
    """Return whether two tensors have different shapes, or different first rows."""
    if tensors.shape(name) != tensors.shape(original):
        return True
    ours, theirs = (tensors.rows(each, 0, SAMPLED_ROWS) for each in (name, original))
    return not bool((ours == theirs).all())
