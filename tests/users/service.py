"""A service: the toy of docs/tenants.md."""

from __future__ import annotations

import signal

from tests.loop.conftest import COMMAND_TIMEOUT_S, REPOSITORY
from tests.users.things import User, thing

SMALL = (
    f"data.path={REPOSITORY / 'launch/recipes/data/first_char.jsonl'}",
    *("train.num_steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4"),
    *("rollout.max_response_len=12", "rollout.min_response_len=0"),
)


@thing("I start the toy service, add two tenants while it starts, follow one, and press Ctrl-C.")
def toy_service(user: User) -> str:
    model, folder = f"model.path={user.toy.model}", user.folder / "svc"
    configuration = REPOSITORY / "launch/services/toy.yaml"
    serve = user.start("serve", configuration, model, f"output_dir={folder}")
    recipe, options = REPOSITORY / "launch/recipes/toy_lora.yaml", ("--service", folder)
    for name in ("ann", "bob"):
        output = f"output_dir={user.folder / name}"
        words = (*options, "--name", name, "--wait", "300", model, output, *SMALL)
        assert f"{name} is queued" in user.mrl("tenants", "add", recipe, *words)
    followed = user.mrl("tenants", "status", "ann", "--watch", *options)
    assert "ann is done" in followed
    assert "2 tenant(s)" in user.mrl("tenants", "list", *options)
    user.mrl("view", folder)
    serve.send_signal(signal.SIGINT)
    done = serve.finish(COMMAND_TIMEOUT_S)
    assert done.returncode == 130, done.stderr
    assert "interrupted; start again to continue with all tenants, each from its" in done.stderr
    lines = (
        *("starting the engine ...", f"mrl tenants add RECIPE --service {folder}"),
        *(f"{name}: loading the model ..." for name in ("ann", "bob")),
        *(f"{name}: joining the service's engine ..." for name in ("ann", "bob")),
    )
    assert [line for line in lines if line not in done.stdout] == []
    return followed.strip().splitlines()[-2].strip()
