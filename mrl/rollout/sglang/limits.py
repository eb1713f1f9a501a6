"""What SGLang cannot do for a model and a recipe, found before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from mrl.config import RolloutConfig
from mrl.errors import InputError
from mrl.rollout.sglang.arguments import check_server_args
from mrl.rollout.sglang.decode import refuse_unfaithful, refuse_weights
from mrl.rollout.sglang.external_models import refuse_unknown


def check_limits(
    model_path: str | Path, config: RolloutConfig, *, on_gpu: bool, return_routes: bool
) -> None:
    """Raise InputError for what the engine would refuse at its start, or run wrongly.

    These are SGLang's arguments, the architectures that it runs as another model or not at all, and
    those whose routes or gate weights it does not return.
    """
    check_server_args(config.server_args)
    file = Path(model_path) / "config.json"
    try:
        hf_config = SimpleNamespace(**json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"model.path: {file} cannot be read: {error}") from None
    refuse_unknown(str(getattr(hf_config, "model_type", "")))
    refuse_unfaithful(hf_config, on_gpu=on_gpu, return_routes=return_routes)
    if config.return_routing_weights:
        refuse_weights(on_gpu=on_gpu, return_routes=return_routes)
