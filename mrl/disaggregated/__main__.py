"""`python -m mrl.disaggregated` is the process of a worker."""

from __future__ import annotations

from typing import Any

from mrl.config.load import recipe_of
from mrl.disaggregated.engine_place import OwnEngine
from mrl.disaggregated.free_worker import FreeWorker
from mrl.disaggregated.process import run_worker
from mrl.disaggregated.worker import Worker
from mrl.preflight import check


def _work(settings: dict[str, Any]) -> None:
    recipe = recipe_of(settings["recipe"], [], "recipe")
    plan = check(recipe, int(settings["world"]), allowed=settings["allowed"])
    kind = FreeWorker if recipe.asynchronous.is_free else Worker
    kind(plan, OwnEngine(plan, int(settings["engine"])), settings).run()


if __name__ == "__main__":
    run_worker(_work)
