"""Episodes of real packages at a real endpoint, whose engine says what a test wants."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mrl.collect.endpoint.record import EpisodeRecord
from mrl.collect.endpoint.server import EndpointServer
from mrl.config import EnvironmentConfig
from mrl.engines.sampling import SamplingParams
from mrl.environments.command import Outcome
from mrl.environments.hosted.pool import EpisodeWorkers
from tests.endpoint.speaking import Speaking, make_record, tokenizer

VERIFIERS = Path(os.environ.get("MRL_VERIFIERS", Path(sys.prefix) / "verifiers")) / "bin/python"
"""The Python of the environment that `make agents` makes."""
MCP = Path(os.environ.get("MRL_MCP", Path(sys.prefix) / "mcp"))
"""The folder into which `make agents` installs the MCP SDK."""
needs_verifiers = pytest.mark.skipif(
    not VERIFIERS.is_file(), reason="verifiers is not installed; `make agents` installs it"
)
needs_mcp = pytest.mark.skipif(
    not (MCP / "mcp").is_dir(), reason="mcp is not installed; `make agents` installs it"
)


@dataclass
class Stage:
    """A policy that talks, and workers that play with it."""

    workers: EpisodeWorkers
    server: EndpointServer
    engine: Speaking = field(default_factory=lambda: Speaking(tokenizer()))

    def play(self, row: dict[str, Any], **settings: Any) -> tuple[Outcome, EpisodeRecord]:
        """Play one episode."""
        settings = {"sampling": SamplingParams(300), "context_len": 5000, **settings}
        record = make_record(self.engine, **settings)
        key = f"key of {id(record)}"
        self.server.app.add(key, record)
        variables = {"OPENAI_BASE_URL": self.server.address, "OPENAI_API_KEY": key}
        try:
            outcome = self.workers.run({"seed": 1, **row}, {**variables, "OPENAI_MODEL": "policy"})
        finally:
            self.server.app.remove(key)
            record.end()
        return outcome, record

    def play_all(self, rows: list[dict[str, Any]]) -> list[tuple[Outcome, EpisodeRecord]]:
        """Play episodes at the same time."""
        with ThreadPoolExecutor(len(rows)) as threads:
            return list(threads.map(self.play, rows))


@contextmanager
def stage(config: EnvironmentConfig) -> Iterator[Stage]:
    with EndpointServer() as server, EpisodeWorkers(config) as workers:
        yield Stage(workers, server)


def text_of(record: EpisodeRecord) -> str:
    """Return the only branch of an episode as text."""
    (leaf,) = record.leaves
    ids = leaf.conversation.token_ids.tolist()
    return record.texts.decode(ids, skip_special_tokens=False)
