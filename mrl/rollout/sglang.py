"""The SGLang engine: a real SGLang server in a child process on loopback, driven over HTTP.

One rollout in six steps: flush the prefix cache, build one batched request of all samples in a
fixed order with a seed each, post it, check every length and the weight version of every answer,
decode routes, group the samples by prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mrl.config import ModelConfig, RolloutConfig
from mrl.errors import InputError
from mrl.rollout.base import CUDA_GRAPH, KV_CACHE, MEMORY_TAGS, WEIGHTS, SamplingParams, sample_seed
from mrl.rollout.sglang_server.decode import (
    build_request,
    decode_sample,
    refuse_unfaithful,
    route_shape,
)
from mrl.rollout.sglang_server.manifest import Manifest
from mrl.rollout.sglang_server.server import Server
from mrl.rollout.sglang_server.settings import server_environment, server_settings
from mrl.rollout.sglang_server.weight_sync import WeightSync
from mrl.types import Prompt, Sample, SampleGroup, WeightBucket

SAMPLES_PER_REQUEST = 1024
"""Up to this many samples form one batch, whose composition does not depend on timing."""
FLUSH_TIMEOUT_S = 60.0


class Engine:
    """`mrl.rollout.base.RolloutEngine` on SGLang. Several can run side by side.

    On CPUs SGLang gives no memory back: sleep and wake keep the state and its rules, so that a run
    on a laptop fails where one on GPUs would, but free nothing.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: RolloutConfig,
        log_path: Path,
        return_routes: bool = True,
        gpu_ids: Sequence[int | str] = (),
        seed: int = 0,
        first_version: int = 0,
        keep_weights_on_host: bool = False,
    ) -> None:
        """Nothing is started yet.

        `gpu_ids` are what CUDA_VISIBLE_DEVICES of the server will be, one for each of
        `config.tensor_parallel_size` ranks; empty runs on CPUs. `seed` is SGLang's own, for what
        has no seed by request. `first_version` is the version of the checkpoint's weights.
        `keep_weights_on_host` allows sleep(1) on GPUs, for a copy of the weights in host memory.
        Raises InputError for an unreadable model folder, a dense model with `return_routes`, or one
        that SGLang would run wrongly.
        """
        # Slow to import, and no other module of this room needs it.
        from transformers import AutoConfig

        if gpu_ids and len(gpu_ids) != config.tensor_parallel_size:
            raise InputError(
                f"rollout.tensor_parallel_size={config.tensor_parallel_size}, and the engine was "
                f"given {len(gpu_ids)} GPUs ({list(gpu_ids)}); expected one a rank"
            )
        if not (Path(model.path) / "config.json").is_file():
            raise InputError(f"model.path {model.path}: no config.json there; give a folder of one")
        hf_config = AutoConfig.from_pretrained(model.path)
        refuse_unfaithful(hf_config, on_gpu=bool(gpu_ids), return_routes=return_routes)
        self._manifest = Manifest(Path(model.path), hf_config)
        self._config = config
        self._shape = route_shape(hf_config) if return_routes else None
        self._context_len: int = config.context_len or hf_config.max_position_embeddings
        self._first_version = first_version
        self._can_keep_weights = keep_weights_on_host or not gpu_ids
        self._server = Server(
            server_settings(
                model,
                config,
                on_gpu=bool(gpu_ids),
                context_len=self._context_len,
                return_routes=return_routes,
                seed=seed,
                first_version=first_version,
                keep_weights_on_host=keep_weights_on_host,
            ),
            server_environment(gpu_ids, config.tensor_parallel_size),
            Path(log_path),
        )
        self._awake: set[str] = set()
        self._version: int | None = None
        self._cache_is_empty = False
        self._sync: WeightSync | None = None

    @property
    def weight_version(self) -> int | None:
        return self._version

    @property
    def state(self) -> str:
        """In words, for error messages."""
        if self._server.client is None:
            return "stopped"
        asleep = [tag for tag in MEMORY_TAGS if tag not in self._awake]
        state = f"asleep ({', '.join(asleep)})" if asleep else "awake"
        version = "no weights" if self._version is None else f"weight version {self._version}"
        return f"{state}, {version}"

    def start(self) -> None:
        if self._server.client is not None:
            raise RuntimeError(f"engine: start() while it runs; it is {self.state}")
        self._server.start(self._config.start_timeout_s)
        self._awake = set(MEMORY_TAGS)
        self._version = self._first_version
        self._cache_is_empty = False
        self._sync = WeightSync(
            self._server,
            self._manifest,
            num_ranks=self._config.tensor_parallel_size,
            method=self._config.weight_sync,
        )

    def stop(self) -> None:
        self._awake = set()
        self._version = None
        if self._sync is not None:
            self._sync.close()
        self._sync = None
        self._server.stop()

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self._require_running("wake")
        unknown = set(tags) - set(MEMORY_TAGS)
        if unknown:
            raise ValueError(
                f"wake: got tags {sorted(unknown)}, expected some of {', '.join(MEMORY_TAGS)}"
            )
        wanted = [tag for tag in MEMORY_TAGS if tag in tags and tag not in self._awake]
        if wanted:
            self._server.post("/resume_memory_occupation", {"tags": wanted})
            self._awake |= set(wanted)

    def sleep(self, level: int = 2) -> None:
        self._require_running("sleep")
        if level not in (1, 2):
            raise ValueError(f"sleep: got level {level}, expected 1 (keep weights) or 2 (drop)")
        if level == 1 and not self._can_keep_weights:
            raise RuntimeError(
                "sleep(1): the engine was built without keep_weights_on_host, so its weights "
                f"cannot be kept; use sleep(2). It is {self.state}"
            )
        # The cache first: what reads the weights must be gone before they are.
        tags = [tag for tag in (KV_CACHE, CUDA_GRAPH, WEIGHTS) if tag in self._awake]
        if tags:
            # The last answer leaves a moment before the scheduler is idle, and a release before
            # that kills the server.
            self._flush_when_idle()
            self._server.post("/release_memory_occupation", {"tags": tags})
            self._awake -= set(tags)
        if level == 2:
            self._version = None

    def _flush_when_idle(self) -> None:
        """Wait for the scheduler, then drop the prefix cache; takes 0.3 s on a CPU."""
        self._server.post(f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}", {})
        self._cache_is_empty = True

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._require_running("update_weights")
        if WEIGHTS not in self._awake:
            raise RuntimeError(
                f"update_weights: the engine is {self.state}; wake(['{WEIGHTS}']) first"
            )
        self._version = None  # Until the last bucket is in, the weights are a mixture.
        assert self._sync is not None
        self.last_sync = self._sync.update(buckets, version)
        self._version = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        sampling: SamplingParams,
        seed: int,
        first_group_id: int = 0,
    ) -> list[SampleGroup]:
        self._require_running("generate")
        if set(MEMORY_TAGS) - self._awake or self._version is None:
            raise RuntimeError(
                f"generate: the engine is {self.state}; wake() it and update_weights() first"
            )
        prompt_ids = [prompt.token_ids.tolist() for prompt in prompts]
        self._check_prompts(prompts, sampling)
        # Cached prefixes change the last bits of log-probs, and their routes are another request's.
        # The wait is for requests that a timeout has aborted and the scheduler has yet to drop.
        if not self._cache_is_empty:
            self._flush_when_idle()
        self._cache_is_empty = False
        jobs = [(i, k) for i in range(len(prompts)) for k in range(samples_per_prompt)]
        chunks = [
            jobs[start : start + SAMPLES_PER_REQUEST]
            for start in range(0, len(jobs), SAMPLES_PER_REQUEST)
        ]

        def roll_out(chunk: list[tuple[int, int]]) -> list[dict[str, Any]]:
            seeds = [sample_seed(seed, prompts[i].prompt_id, k) for i, k in chunk]
            body = build_request(
                [prompt_ids[i] for i, _ in chunk],
                seeds,
                sampling,
                return_routes=self._shape is not None,
            )
            return self._server.generate(
                body, num_samples=len(chunk), timeout_s=self._config.request_timeout_s
            )

        with ThreadPoolExecutor(max_workers=max(1, len(chunks))) as pool:
            answers = [answer for part in pool.map(roll_out, chunks) for answer in part]
        samples: list[list[Sample]] = [[] for _ in prompts]
        for (i, _), answer in zip(jobs, answers, strict=True):
            samples[i].append(
                decode_sample(
                    answer,
                    group_id=first_group_id + i,
                    prompt_ids=prompt_ids[i],
                    version=self._version,
                    shape=self._shape,
                )
            )
        return [SampleGroup(*pair) for pair in zip(prompts, samples, strict=True)]

    def _check_prompts(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        for prompt in prompts:
            num_tokens = prompt.token_ids.numel()
            if not num_tokens:
                raise ValueError(f"{prompt.source}: the prompt has no tokens, expected at least 1")
            if num_tokens + sampling.max_new_tokens > self._context_len:
                raise ValueError(
                    f"{prompt.source}: {num_tokens} prompt tokens + {sampling.max_new_tokens} new "
                    f"tokens exceed the context of {self._context_len}"
                )

    def _require_running(self, action: str) -> None:
        if self._server.client is None:
            raise RuntimeError(f"{action}: the engine is {self.state}; start() it first")
