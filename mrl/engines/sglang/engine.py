"""The engine of `rollout.engine: sglang`, found by this file's name."""

from mrl.engines.sglang.server import SGLangServer

Engine = SGLangServer
