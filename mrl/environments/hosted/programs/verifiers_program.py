"""The worker of `environment.verifiers`: it loads the environment once and plays its episodes.

`verifiers_program.py` plays episodes (see episode_loop.py); `verifiers_program.py tasks` writes the
tasks of the environment's taskset as rows of data. It is written for verifiers 0.4, whose environments
are tasksets, harnesses and `Env` classes (`verifiers.v1`).
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from episode_loop import BadInput, Episode, EpisodeFailed, Play, Played, main

OWN_HARNESS = "mrl_chat"
"""The id of the harness in mrl_chat.py, under which verifiers imports it."""
VERSIONS = "0.4"


def _verifiers() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        wanted = (error.name or "").partition(".")[0]
        what = "verifiers" if wanted == "verifiers" else f"{wanted}, which verifiers needs,"
        raise BadInput(
            f"{what} is not installed for {sys.executable}; pip install 'verifiers>=0.4,<0.5' into an "
            "environment of its own, and name its Python as environment.python"
        ) from None
    version = importlib.metadata.version("verifiers")
    if not version.startswith(f"{VERSIONS}."):
        raise BadInput(f"verifiers {version} is installed, expected {VERSIONS}.x")
    return vf


def _taskset_id(name: str) -> str:
    """Return the id by which verifiers imports an environment. If `name` is a folder, the folder is put
    on the path, also on that of the servers of its tools."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
        paths = (place, os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    project = folder / "pyproject.toml"
    if project.is_file():
        named = tomllib.loads(project.read_text()).get("project", {}).get("name")
        if named:
            return named
    return folder.resolve().name


def _split(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the environment and those of the selection of tasks."""
    arguments = dict(spec["arguments"])
    select = arguments.pop("select", None) or {}
    taskset = {"id": _taskset_id(spec["name"]), **(arguments.pop("taskset", None) or {})}
    return {**arguments, "taskset": taskset}, select


def _config(vf: Any, spec: dict[str, Any]) -> tuple[Any, str]:
    """Return the environment's config, and the name of the role that the policy plays.

    A role whose author chose neither runtime nor harness gets those that need no other machine and no
    installation: a subprocess, and a chat in this process.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    arguments, _ = _split(spec)
    config = vf.resolve_env_config(arguments)
    has_own = vf.default_harness_id(config.taskset.id) != "bash"
    changes: dict[str, Any] = {}
    for name, role in agent_config_fields(config).items():
        for where, retries in ((f"{name}.retries", role.retries), ("retries", config.retries)):
            if retries != vf.RetryConfig():
                raise BadInput(
                    f"environment.arguments.{where} is set, but an episode is played once: its tokens "
                    "are recorded, and those of a failed attempt with them; leave it out"
                )
        update: dict[str, Any] = {}
        if "runtime" not in role.model_fields_set:
            update["runtime"] = vf.SubprocessConfig()
        if role.harness is None and not has_own:
            update["harness"] = vf.harness_config_type(OWN_HARNESS)(id=OWN_HARNESS)
        changes[name] = role.model_copy(update=update)
    playing = [name for name, role in changes.items() if role.client is None]
    if len(playing) != 1:
        raise BadInput(
            f"the policy would play {' and '.join(map(repr, playing)) or 'no role'} of this "
            f"environment, of {', '.join(changes)}, expected one; give every other role a client "
            "(environment.arguments: {ROLE: {client: {base_url, api_key_var}, model}})"
        )
    return config.model_copy(update=changes), playing[0]


@asynccontextmanager
async def open_environment(spec: dict[str, Any]) -> AsyncIterator[Play]:
    vf = _verifiers()
    config, role = _config(vf, spec)
    env = vf.load_environment(config)
    task_class = type(env.taskset).task_type()

    async def play(episode: Episode) -> Played:
        given = episode.given.get("task")
        if not isinstance(given, dict):
            raise EpisodeFailed(
                f"the row has no column `task` with a task of {config.taskset.id}; leave data out to "
                "take the environment's own tasks"
            )
        task = task_class(task_class.data_type().model_validate(given), config.taskset.task)
        # verifiers reads keys from variables only, and passes none with this name on.
        variable = f"MRL_EPISODE_API_KEY_{episode.number}"
        os.environ[variable] = episode.key
        try:
            client = vf.EvalClientConfig(base_url=episode.base_url, api_key_var=variable)
            context = vf.ModelContext(model=episode.model, client=client)
            played = await env.run_episode(task, context)
            return _played(played, role, is_complete=env.complete(played))
        finally:
            os.environ.pop(variable, None)

    async with env.serving():
        # Without a server of the whole worker, each rollout opens one of its own. A server keeps the
        # clients of its rollouts, and every episode has another client, because it has another key.
        env._interception = None
        yield play


def _played(episode: Any, role: str, *, is_complete: bool) -> Played:
    traces = [each for each in episode.traces if each.agent.name == role and each.agent.trainable]
    others = [each for each in episode.traces if each not in traces]
    for errors in (episode.errors, *(each.errors for each in traces if not each.ok)):
        if errors:
            raise EpisodeFailed(f"{errors[-1].type}: {' '.join(errors[-1].message.split())}")
    if len(traces) != 1:
        raise EpisodeFailed(
            f"the role {role!r} played {len(traces)} times in this episode, expected once, because an "
            "episode has one reward"
        )
    (trace,) = traces
    if not is_complete:
        errors = [error for each in others for error in each.errors]
        raise EpisodeFailed(
            f"it was not completed: {errors[-1].type}: {errors[-1].message}"
            if errors
            else f"it was not completed (stop condition {trace.stop_condition})"
        )
    if not any(each is not None for each in trace.rewards.values()):
        raise EpisodeFailed("its task gave no reward")
    rewards = {name: each.score for name, each in trace.rewards.items() if each is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    parts = metrics | (rewards if len(rewards) > 1 else {})
    return Played(trace.reward, None, {name: float(value) for name, value in parts.items()})


def tasks(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row of data for each task: `prompt` as messages, and `task`, the task itself."""
    vf = _verifiers()
    arguments, select = _split(spec)
    taskset = vf.load_taskset(vf.resolve_env_config(arguments).taskset)
    taskset = taskset.select(vf.SelectConfig.model_validate(select))
    if not taskset.bounded:
        raise BadInput(
            "this taskset has no end; say how many tasks to take (arguments: {select: {limit: 1000}})"
        )
    for task in taskset:
        data = task.data
        yield {
            "row": {
                "prompt": _messages(data),
                "task": data.model_dump(mode="json", exclude_none=True),
            }
        }


def _messages(data: Any) -> list[dict[str, Any]]:
    """Return a task's prompt as messages, for the length and for reading; the episode itself gets its
    prompt from the harness."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    from verifiers.v1.types import content_text

    given = [
        {"role": message.role, "content": content_text(message.content) or "(no text)"}
        for message in data.prompt or ()
    ]
    return [*system, *given] or [{"role": "user", "content": "(the environment begins)"}]


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(open_environment, {"tasks": tasks})
