"""Python: a sweep, a callback, an algorithm in a file; each script is a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.docs.pages import pages
from tests.loop.conftest import COMMAND_TIMEOUT_S, REPOSITORY, environment
from tests.users.things import User, thing


def python(user: User, code: str) -> str:
    """Run a script that finds the toy recipe with small steps as `base`, and return what it printed."""
    head = (
        "import mrl\n"
        f"base = mrl.load_recipe({user.recipe('run')[0]!r}, {user.recipe('run')[1:]!r})\n"
        "base = mrl.load_recipe(base, {'train.num_steps': 2})\n"
    )
    script = user.write("script.py", head + code)
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        cwd=user.folder,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SWEEP = """
for lr in (1e-3, 1e-2):
    result = mrl.train(mrl.load_recipe(base, {"optimizer.lr": lr, "output_dir": f"lr_{lr:g}"}))
    print("lr", result.metrics[-1]["lr"])
print("evaluated", mrl.evaluate(mrl.load_recipe(base, {
    "output_dir": "lr_0.01", "eval.sets": [{"name": "a", "path": base.data.path, "num_prompts": 4}]
})).step)
"""
STOPPED = """
class Stop(mrl.Callback):
    def on_step(self, step, metrics, groups):
        print("step", step, len(groups), groups[0].texts is not None)
        return step == 0

print("stopped", mrl.train(base, callbacks=[Stop()]).stopped)
print("continued", len(mrl.train(base).metrics))
"""
ALLOWED = """
mrl.train(mrl.load_recipe(base, {"train.num_steps": 1}))
more = mrl.load_recipe(base.output_dir, {"optimizer.lr": 1e-4, "train.num_steps": 2})
try:
    mrl.train(more)
except mrl.InputError as error:
    print("refused", error)
print("lr", mrl.train(more, allow=["optimizer.lr"]).metrics[-1]["lr"])
"""
REFUSED = """
try:
    mrl.load_recipe(base, {"optimizer.learning_rte": 1})
except mrl.InputError as error:
    print(error)
"""


@thing("I sweep the learning rate in one Python process, and evaluate the last run.")
def sweep(user: User) -> str:
    printed = python(user, SWEEP).splitlines()
    found = [line for line in printed if line.startswith(("lr 0", "evaluated"))]
    assert found == ["lr 0.001", "lr 0.01", "evaluated 2"]
    return "; ".join(found)


@thing("My callback stops a run, and another call continues it.")
def callback(user: User) -> str:
    printed = python(user, STOPPED)
    assert "step 0 4 True" in printed
    assert "stopped a callback stopped the run: saved a checkpoint with 1 step" in printed, printed
    assert "continued 2" in printed
    return "stopped after step 1, continued to 2"


@thing("I load the folder of a run in Python, and continue it with a learning rate that I allow.")
def allowed(user: User) -> str:
    printed = python(user, ALLOWED)
    assert "--allow optimizer.lr" in printed
    assert "lr 0.0001" in printed
    return "refused without allow, continued with it"


@thing("I mistype a key in Python.", is_long=False)
def mistyped(user: User) -> str:
    printed = python(user, REFUSED)
    assert "unknown key 'optimizer.learning_rte'" in printed
    return printed.strip()


@thing(
    "I train with the README's own algorithm, copied into a file.",
    wall="The README's own algorithm example is refused.",
)
def algorithm_file(user: User) -> str:
    (readme,) = [page for page in pages() if page.name == "README.md"]
    (code,) = [block.text for block in readme.blocks if "sequence_weights =" in block.text]
    user.write("my/median.py", code)
    user.train("run", "algorithm.name=my/median.py", "train.num_steps=1")
    return user.mrl("check", *user.recipe("run"), "algorithm.name=my/median.py").splitlines()[-1]
