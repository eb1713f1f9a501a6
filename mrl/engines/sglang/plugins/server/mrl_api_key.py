"""SGLang plugin: every path of the server requires the API key.

SGLang answers /health, /health_generate, /ready, /metrics and every OPTIONS request without a key.
Because /health_generate makes the scheduler generate, any user of the machine could slow a run
down.
"""

from mrl.engines.sglang.compat import hook


def register():
    hook("decide_request_auth", of_any_path, "AROUND")


def of_any_path(original, **request):
    """Authorize every request in the way in which SGLang authorizes a POST to `/`, which always
    requires the key."""
    return original(**{**request, "method": "POST", "path": "/"})
