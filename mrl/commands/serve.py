"""`mrl serve SERVICE.yaml [key=value ...]` trains adapters for many tenants, also under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.errors import ExitCode
from mrl.system.processes import die_with_torchrun
from mrl.system.stop import WHO, remember_signals, remembering_signals

if TYPE_CHECKING:
    from mrl.config import ServiceConfig
    from mrl.preflight.roles import Roles
    from mrl.service.registry import Registry
    from mrl.service.service import Service
    from parallel.dims import ParallelDims


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "serve",
        help="train the LoRA adapters of many tenants on one base model",
        description="Start a service: one base model and one engine, on which tenants train adapters "
        "of their own. A service that was there already continues with its tenants. Add tenants with "
        "`mrl tenants add RECIPE --service FOLDER`. On several GPUs: python -m mrl.launch "
        "--nproc-per-node N -m mrl serve SERVICE.",
    )
    command.add_argument("service", metavar="SERVICE", help="configuration of the service, YAML")
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="keys to set"
    )
    command.add_argument(
        "--until-done", action="store_true", help="end when no tenant is queued or running"
    )
    after = "start again to continue with all tenants, each from its last checkpoint"
    command.set_defaults(run=run, after_interrupt=after)


def run(args: argparse.Namespace) -> None:
    die_with_torchrun()
    remember_signals()
    from mrl.config.load import load_service

    config = load_service(args.service, args.overrides)
    from parallel.mesh import destroy_mesh, world_size

    signal = serve(config, world_size(), until_done=args.until_done)
    destroy_mesh()
    if signal:
        from mrl.jobs.report import note_saved

        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: {WHO[signal]}: all tenants are saved", file=sys.stderr)
            note_saved()
        sys.exit(ExitCode.SAVED)


@remembering_signals()  # SIGUSR1 while the model loads and the engine starts
def serve(config: ServiceConfig, world: int, *, until_done: bool = False) -> int:
    """Serve tenants on this rank, which is one of `world` ranks.

    Returns what stopped the service: a key of `mrl.system.stop.WHO`, such as TERMINATION for
    SIGTERM, or 0 if the service ended by itself. With `until_done`, the service ends when no tenant
    has work left.
    """
    from parallel import prepare
    from parallel.connections import set_connections

    set_connections(config.parallel)  # before torch asks for GPUs
    prepare()  # before anything imports Megatron
    from mrl.jobs.restart_command import serve_command
    from mrl.preflight.machine import check_machine, local_ranks
    from mrl.preflight.roles import roles_of_engines
    from mrl.run import console
    from mrl.run.failure import clear_failure
    from mrl.service.build import service_dims
    from mrl.service.registry import Registry
    from mrl.service.reward_user import close_folder, prepare_reward_user
    from mrl.service.start import note_start
    from mrl.system.disk import refusing

    rank = int(os.environ.get("RANK", "0"))
    roles = roles_of_engines(config.rollout_config(), world)
    dims = service_dims(config, roles)
    if roles.is_rollout(rank):
        from mrl.jobs.train import roll_out
        from mrl.service.remote_engines import job_of_service

        roll_out(job_of_service(config), config.watch, roles, rank)
        return 0
    is_main = rank == 0
    check_machine(local_ranks(world), console.warning if is_main else lambda text: None)
    prepare_reward_user(config.tenants.reward_user, is_main=is_main)
    with Registry(config) if is_main else nullcontext() as registry:
        if registry is not None:
            with refusing(registry.root):
                clear_failure(registry.root)
                note_start(registry.root, serve_command(registry.root))
            close_folder(registry.root, config.tenants.reward_user)
        return _serve(config, roles, dims, registry, until_done=until_done)


def _serve(
    config: ServiceConfig,
    roles: Roles,
    dims: ParallelDims,
    registry: Registry | None,
    *,
    until_done: bool,
) -> int:
    """Connect the trainer ranks, build the service and run it under the watchdog.

    `registry` is None on all ranks except rank 0. The result is that of `serve`.
    """
    from mrl.jobs.out_of_memory import memory_advice_of_service
    from mrl.jobs.report import reporting
    from mrl.jobs.restart_command import serve_command
    from mrl.run import console
    from mrl.service.build import build_service
    from mrl.watch.start import EngineRanks, least_limits_of_service, watching
    from parallel.mesh import compare_clocks, init_mesh, join_store

    folder = Path(config.output_dir)
    command, least = serve_command(folder), least_limits_of_service(config)
    made: list[Service] = []
    with ExitStack() as undo:
        undo.enter_context(
            reporting(
                folder,
                command,
                lambda error: memory_advice_of_service(error, config, command),
                lambda: made[0].num_turns if made else None,
            )
        )
        mesh = init_mesh(dims, seed=0, timeout_s=config.longest_wait_s)
        if (clock_warning := compare_clocks()) and registry is not None:
            console.warning(clock_warning)
        rollout_ranks = range(roles.num_trainers, roles.world)
        engine_ranks = None
        if rollout_ranks:  # the watchdog watches them, too
            engine_ranks = EngineRanks(join_store()[0], rollout_ranks, config.longest_wait_s)
        undo.enter_context(watching(config.watch, least, folder, command, engine_ranks))
        if registry is None:
            made.append(build_service(config, roles, mesh, None))
        else:
            # Before there are threads of callers. transformers replaces its own module while it is
            # imported, so a second thread that imports it then gets a module without its names.
            from transformers import AutoConfig, AutoTokenizer  # noqa: F401

            from mrl.service.control import Control  # with the HTTP library, which rank 0 needs

            control = undo.enter_context(Control(registry))
            pairs = [("service", str(registry.root)), ("model", config.model.path)]
            if config.control.tinker is not None:
                from mrl.tinker.server import TinkerServer

                pairs.append(("tinker", undo.enter_context(TinkerServer(registry)).address))
            pairs.append(("placement", roles.describe()))
            add = f"mrl tenants add RECIPE --service {shlex.quote(str(registry.root))}"
            console.pairs([*pairs, ("next", add)])
            made.append(build_service(config, roles, mesh, registry, control.publish))
            if (membership := made[0].membership) is not None:
                control.manage(membership)
        return made[0].serve(until_done=until_done)
