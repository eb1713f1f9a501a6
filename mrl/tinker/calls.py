"""Combines the parts of the API, and answers the requests that only read."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mrl.service.registry import Registry
from mrl.service.sessions.bodies import MAX_TOKENS
from mrl.tinker import bodies, paths
from mrl.tinker.backend import Backend
from mrl.tinker.checkpoints import Checkpoints, as_time, page
from mrl.tinker.futures import Futures
from mrl.tinker.keys import Keys
from mrl.tinker.ledger import Ledger
from mrl.tinker.models import Models, texts
from mrl.tinker.sampling import Samplers
from mrl.tinker.training import Training
from mrl.web.app import Incoming
from mrl.web.limits import Refused

CHUNK_LEN = 1024
"""Maximum number of sequences that the SDK sends in one request."""
BYTES_OF_TOKEN = 16
"""The SDK counts at least this many bytes for each token of a sequence."""
URLS_S = 3600.0
"""Seconds for which the address of a file can be used."""
FILES = ("adapter_config.json", "adapter_model.safetensors", "README.md")
MAX_PAGE = 1000
"""Most rows of a list in one answer."""
Answer = dict[str, Any]


class Calls:
    """The parts of the API. `address`: where it listens, such as `http://127.0.0.1:8080`."""

    def __init__(self, registry: Registry, ledger: Ledger, keys: Keys) -> None:
        self.keys, self.ledger = keys, ledger
        self.address = ""
        self.is_closing = False
        """Whether the service is ending, so that requests must not wait any longer."""
        self.backend = backend = Backend(registry, ledger)
        self.checkpoints = Checkpoints(backend)
        self.models = Models(backend, self.checkpoints)
        self.samplers = Samplers(backend, self.checkpoints, self.models.lora)
        self.training = Training(backend, self.checkpoints, self.samplers)
        self.futures = Futures(backend)
        self._secret = secrets.token_bytes(32)

    def client_config(self) -> Answer:
        """Return the flags that a client reads once."""
        return {
            "pjwt_auth_enabled": False,
            "credential_default_source": "api_key",
            "parallel_fwdbwd_chunks": False,
            "proto_compress_fwdbwd": False,
            "fwdbwd_max_chunk_len": CHUNK_LEN,
            "fwdbwd_max_chunk_bytes_count": (MAX_TOKENS - CHUNK_LEN) * BYTES_OF_TOKEN,
            "sample_max_concurrent_requests": 512,
            "sample_enable_stuck_detection": False,
            "use_pyqwest_transport": False,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "sample_join_sampling_session": True,
        }

    def dynamic_config(self) -> Answer:
        """Return the flags that a client reads periodically."""
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

    def capabilities(self) -> Answer:
        """Return the models that can be trained and sampled: the base model of the service."""
        model = {
            "model_name": self.backend.model_name,
            "max_context_length": self.backend.bounds.context_len,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def load(self, owner: str, body: bodies.LoadWeights) -> Answer:
        """Load a checkpoint into a model, or into a new one."""
        if body.model_id is not None:
            return self.training.load(owner, body)
        return self.models.load_new(owner, body)

    def finish(self, incoming: Incoming) -> None:
        """End a client's session."""
        body = bodies.read(bodies.Finish, incoming.json())
        self.models.finish(incoming.owner, incoming.path["session"], body)

    def sessions(self, incoming: Incoming) -> Answer:
        """Return a page of a user's sessions, the newest first."""
        rows = self.ledger.find("sessions", owner=incoming.owner)
        offset, limit = _page(incoming, 20)
        return page("sessions", [row["id"] for row in reversed(rows)], offset, limit)

    def session(self, incoming: Incoming) -> Answer:
        """Return the models and samplers of a session."""
        row = self.backend.owned("sessions", incoming.owner, incoming.path["session"])
        return {
            "training_run_ids": [m["id"] for m in self.ledger.find("models", session=row["id"])],
            "sampler_ids": [s["id"] for s in self.ledger.find("samplers", session=row["id"])],
            "user_metadata": texts(row["metadata"]),
            "display_name": row["name"],
        }

    def training_runs(self, incoming: Incoming) -> Answer:
        """Return a page of a user's models, the newest first."""
        offset, limit = _page(incoming, 20)
        rows = self.ledger.find("models", owner=incoming.owner)[::-1]
        found = page("training_runs", rows, offset, limit)
        return {
            **found,
            "training_runs": list(map(self.models.training_run, found["training_runs"])),
        }

    def training_run(self, incoming: Incoming) -> Answer:
        """Return one model."""
        return self.models.training_run(self._run(incoming))

    def checkpoints_of_run(self, incoming: Incoming) -> Answer:
        """Return the checkpoints of a model."""
        return {"checkpoints": self.checkpoints.of_run(self._run(incoming)["id"])}

    def checkpoints_of_user(self, incoming: Incoming) -> Answer:
        """Return a page of a user's checkpoints."""
        return self.checkpoints.of_user(incoming.owner, *_page(incoming, 100))

    def delete_checkpoint(self, incoming: Incoming) -> None:
        """Remove a checkpoint."""
        self.checkpoints.delete(incoming.owner, _path(incoming))

    def set_ttl(self, incoming: Incoming) -> None:
        """Set how long a checkpoint is kept."""
        body = bodies.read(bodies.Ttl, incoming.json())
        self.checkpoints.set_ttl(incoming.owner, _path(incoming), body)

    def file_urls(self, incoming: Incoming) -> Answer:
        """Return the addresses of the files of a checkpoint, as a PEFT folder."""
        folder = self.checkpoints.export(incoming.owner, _path(incoming))
        expires = time.time() + URLS_S
        content = f"{int(expires)}.{folder.relative_to(self.backend.registry.root)}"
        mark = f"{self._sign(content)}.{content.encode().hex()}"
        names = [name for name in FILES if (folder / name).is_file()]
        urls = {name: f"{self.address}/api/v1/files/{mark}/{quote(name)}" for name in names}
        return {"urls": urls, "expires": as_time(expires)}

    def file(self, mark: str, name: str) -> Path:
        """Return a file whose address `file_urls` has made. Raises Refused for any other."""
        sign, _, encoded = mark.partition(".")
        try:
            content = bytes.fromhex(encoded).decode()
        except ValueError:
            raise Refused(404, "there is no such file") from None
        if (
            not hmac.compare_digest(sign.encode(), self._sign(content).encode())
            or name not in FILES
        ):
            raise Refused(404, "there is no such file")
        expires, _, folder = content.partition(".")
        file = self.backend.registry.root / folder / name
        if int(expires) < time.time() or not file.is_file():
            raise Refused(410, "the address of the file is no longer valid; ask for a new one")
        return file

    def _sign(self, content: str) -> str:
        return hmac.new(self._secret, content.encode(), hashlib.sha256).hexdigest()

    def _run(self, incoming: Incoming) -> dict[str, Any]:
        return self.backend.owned("models", incoming.owner, incoming.path["run"])


def _page(incoming: Incoming, limit: int) -> tuple[int, int]:
    """Return `offset` and `limit` of the query; `limit` is the default. Raises Refused."""
    given = {"offset": 0, "limit": limit}
    for name, default in given.items():
        text = incoming.query.get(name, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise Refused(400, f"{name} is {text[:80]!r}, expected a number of 0 or more")
        given[name] = int(text)
    return given["offset"], min(given["limit"], MAX_PAGE)


def _path(incoming: Incoming) -> str:
    run, segment, name = (incoming.path[key] for key in ("run", "segment", "name"))
    return str(paths.parse(f"tinker://{run}/{segment}/{name}"))
