"""Asks the job of a folder, on this machine, for its engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.errors import InputError, RunFailed
from mrl.web.unix_socket import NoAnswer, ask_unix

TIMEOUT_S = 120.0
"""Seconds to wait for an answer. The job answers at once, unless it is busy sending weights."""


class NobodyAnswers(InputError):
    """No job can be reached in a folder."""


def ask_engines(
    folder: Path, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a request of `mrl.engine_pool.elastic.control` to the job of a folder, and return its
    answer.

    Raises NobodyAnswers if no job answers, InputError if the job refuses the request, and RunFailed if
    the answer is lost.
    """
    try:
        status, answer = ask_unix(folder, method, path, body, TIMEOUT_S)
    except OSError:
        raise NobodyAnswers(_why_nobody(folder)) from None
    except NoAnswer as error:
        raise RunFailed(f"the job in {folder} did not answer: {error}; it may have ended") from None
    if status >= 400:
        error = answer.get("error") or f"the job in {folder} answered with HTTP {status}: {answer}"
        raise RunFailed(error) if status >= 500 else InputError(error)
    return answer


def _why_nobody(folder: Path) -> str:
    """Return why no job can be reached in a folder, and what to do."""
    configs = [folder / name for name in ("service.yaml", "config.yaml")]
    config = next((file for file in configs if file.is_file()), None)
    if config is None:
        return (
            f"{folder} is the folder of no run and of no service: it has no config.yaml and no "
            "service.yaml; give an output_dir"
        )
    from mrl.config.load import read_tree

    rollout = read_tree(config, []).get("rollout")
    if not isinstance(rollout, dict) or rollout.get("placement") != "disaggregated":
        return (
            f"{folder}: its engines share the devices of the trainer (rollout.placement=colocated); "
            "only engines on ranks of their own can be listed, added and removed"
        )
    return (
        f"no job answers in {folder}: it is over, its engines are not being started yet, or its rank "
        "0 is on another machine; there, run the command again"
    )
