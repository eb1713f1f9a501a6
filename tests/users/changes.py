"""Changes of mind: paths that move while a run is on."""

from __future__ import annotations

from tests.users.things import User, thing


@thing("I move my data; the run continues, as the contents are equal.", is_long=False)
def moved_data(user: User) -> str:
    from mrl.config import load_recipe
    from mrl.run.folder import RunFolder

    rows_ = "".join(f'{{"prompt": "a{i}"}}\n' for i in range(16))
    recipe = load_recipe(user.recipe("run")[0], [
        *user.recipe("run")[1:], f"data.path={user.write('a.jsonl', rows_)}"])  # fmt: skip
    folder = RunFolder(recipe.output_dir)
    folder.open(recipe, folder.check(recipe))
    folder.add_metrics({"step": 0})
    folder.close()
    moved = user.write("elsewhere/b.jsonl", rows_)
    user.mrl("check", folder.root, f"data.path={moved}")
    moved.write_text(rows_ * 2)
    return user.mrl("check", folder.root, f"data.path={moved}", code=2).strip()
