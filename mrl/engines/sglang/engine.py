"""Provides the engine for `rollout.engine: sglang`, which mrl finds by the name of this file."""

from mrl.engines.sglang.server import SGLangServer

Engine = SGLangServer
