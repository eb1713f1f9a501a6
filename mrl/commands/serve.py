"""`mrl serve SERVICE.yaml [key=value ...]` trains the adapters of many tenants, also under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mrl.config import ServiceConfig
from mrl.errors import ExitCode
from mrl.system.processes import die_with_torchrun
from mrl.system.stop import WHO, remember_signals, remembering_signals


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
    command.add_argument("overrides", nargs="*", metavar="key=value", help="keys to set")
    command.add_argument(
        "--until-done", action="store_true", help="end when no tenant is queued or running"
    )
    command.set_defaults(run=run, after_interrupt="start again to continue with all tenants")


def run(args: argparse.Namespace) -> None:
    die_with_torchrun()
    remember_signals()
    from mrl.config.load import load_service
    from parallel.mesh import destroy_mesh, world_size

    told = serve(
        load_service(args.service, args.overrides), world_size(), until_done=args.until_done
    )
    destroy_mesh()
    if told:
        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: {WHO[told]}: all tenants are saved", file=sys.stderr)
        sys.exit(ExitCode.SAVED)


@remembering_signals()  # SIGUSR1 while the model loads and the engine starts
def serve(config: ServiceConfig, world: int, *, until_done: bool = False) -> int:
    """Serve tenants on this rank of `world`; return who stopped the service, as `mrl.system.stop` says,
    and 0 where it ended by itself."""
    from mrl.preflight.machine import check_machine, local_ranks
    from mrl.run import console
    from mrl.tenants.colocated import ColocatedService
    from mrl.tenants.control import Control
    from mrl.tenants.open_house import open_house, service_dims
    from mrl.tenants.registry import Registry
    from parallel import prepare
    from parallel.mesh import init_mesh

    is_main = os.environ.get("RANK", "0") == "0"
    check_machine(local_ranks(world), console.warning if is_main else lambda text: None)
    dims = service_dims(config, world)
    prepare()
    with ExitStack() as undo:
        registry = undo.enter_context(Registry(config)) if is_main else None
        mesh = init_mesh(dims, seed=0, timeout_s=config.rollout.request_timeout_s)
        house = open_house(config, mesh, Path(config.output_dir) / "logs")
        if registry is None:
            return ColocatedService(config, house, None).serve(until_done=until_done)
        control = undo.enter_context(Control(registry))
        console.pairs([("service", str(registry.root)), ("model", config.model.path)])
        return ColocatedService(config, house, registry, control.publish).serve(
            until_done=until_done
        )
