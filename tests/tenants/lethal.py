"""A plugin of SGLang for tests: a prompt that ends with three tokens 77 ends the scheduler.

No request that mrl lets through is known to do so, so the tests bring one.
"""

from __future__ import annotations

from pathlib import Path

LETHAL = [77, 77, 77]
CODE = f"""
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.schedule_batch.Req.init_next_round_input"
    HookRegistry.register(target, look, HookType.BEFORE)


def look(request, *args, **options):
    if list(request.origin_input_ids)[-3:] == {LETHAL}:
        raise RuntimeError("a lethal request")
"""


def write_plugin(folder: Path) -> Path:
    """Write the plugin; return the folder, which belongs on PYTHONPATH."""
    info = folder / "lethal_test-0.0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "lethal_test.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lethal-test\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nlethal_test = lethal_test:register\n"
    )
    return folder
