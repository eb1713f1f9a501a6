"""SGLang plugin: every path of the server wants the API key.

SGLang answers /health, /health_generate, /ready and /metrics, and every OPTIONS request, without it.
The second of them makes the scheduler generate, so any user of the machine could slow a run down.
"""

from mrl.rollout.sglang.compat import hook


def register():
    hook("decide_request_auth", of_any_path, "AROUND")


def of_any_path(original, **request):
    """Decide as for a path and a method that have no exception."""
    return original(**{**request, "method": "POST", "path": "/"})
