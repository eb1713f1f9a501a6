"""SGLang plugin: every path of the server wants the API key.

SGLang answers /health, /health_generate, /ready and /metrics, and every OPTIONS request, without it.
The second of them makes the scheduler generate, so any user of the machine could slow a run down.
"""

TARGET = "sglang.srt.utils.auth.decide_request_auth"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, of_any_path, HookType.AROUND)


def of_any_path(original, **request):
    """Decide as for a path and a method that have no exception."""
    return original(**{**request, "method": "POST", "path": "/"})
