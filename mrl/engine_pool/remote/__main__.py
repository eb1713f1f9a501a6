"""`python -m mrl.engine_pool.remote` runs a worker of a rollout rank."""

from __future__ import annotations

from typing import Any

from mrl.config.load import recipe_of
from mrl.engine_pool.remote.engine_owner import make_own_engine
from mrl.engine_pool.remote.process import run_worker
from mrl.engine_pool.remote.worker import Worker
from mrl.preflight import check


def _work(settings: dict[str, Any]) -> None:
    recipe = recipe_of(settings["recipe"], [], "recipe")
    plan = check(recipe, int(settings["world"]), allowed=settings["allowed"])
    engine = make_own_engine(plan, int(settings["engine"]))
    try:
        Worker.of_plan(plan, engine, settings).run(engine.owner.start)
    finally:
        engine.owner.stop()


if __name__ == "__main__":
    run_worker(_work)
