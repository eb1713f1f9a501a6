"""One sync of an adapter brings every matrix exactly once, under the name of its version, with proof.

The base of the engine never changes. A version is loaded beside those before it, under a name of its
own: requests in flight finish with the one that they began with, and an old one goes when nothing uses
it any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable

from mrl.kernels.digest import MODULUS, weight_sums
from mrl.rollout.base import SyncReport
from mrl.rollout.engine_group import file_handle
from mrl.rollout.sglang.adapter.digests import ACTION, check_adapter_held, check_exported
from mrl.rollout.sglang.adapter.form import AdapterForm, LaidOut
from mrl.rollout.sglang.adapter.manifest import AdapterManifest, sglang_modules
from mrl.rollout.sglang.body import adapter_name
from mrl.rollout.sglang.weight_sync import Poster, SyncClock
from mrl.rollout.sglang.weights import serialize_bucket
from mrl.types import WeightBucket


class AdapterSync:
    """A sync object serves one server from its start to its stop: make another after a restart.

    update() is for one thread at a time, the other methods are for any.
    """

    def __init__(
        self,
        server: Poster,
        manifest: AdapterManifest,
        *,
        num_ranks: int,
        name: str = "mrl",
        stacks: bool | None = None,
    ) -> None:
        """`num_ranks` tensor-parallel ranks, all of them on this machine. `name` is that of the adapter
        in the engine, and `stacks` as in `AdapterForm`."""
        self._server = server
        self._name = name
        self._adapter = manifest.adapter
        self._num_ranks = num_ranks
        self._manifest = manifest
        shapes = {**manifest.required, **manifest.zeros}
        self._form = AdapterForm(shapes, manifest.adapter, stacks=stacks)
        self._loaded: dict[int, str] = {}
        """Names of what the server has, by version, the newest last."""
        self._changing = threading.Lock()
        self._is_base = True

    def name_of(self, version: int) -> str | None:
        """Return the name by which requests ask for a version; None before the first update, when they
        go to the base. Raises RuntimeError where the version is not loaded."""
        name = self._loaded.get(version)
        if name is None and not self._is_base:
            raise RuntimeError(
                f"version {version} of the adapter is not loaded, expected one of "
                f"{', '.join(map(str, self._loaded)) or 'none'}"
            )
        return name

    def update(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        """Load a whole adapter and prove it. Leaves `buckets` where it stopped: drain it if others
        wait.

        Raises ValueError where a bucket carries another version or dtype, or a matrix is missing,
        unknown, repeated or of another shape, and RuntimeError where other matrices come than were
        exported, or the engine refuses them or holds others in the end. What was loaded before stays.
        """
        clock = SyncClock()
        laid_out, came, source_s = self._take(buckets, version, clock)
        num_bytes = laid_out.num_bytes - sum(
            laid_out.views[name].nbytes for name in self._manifest.zeros
        )
        with clock.part("push"):
            self._load(laid_out, version)
        with clock.part("digest"):
            self._check(version, came)
        return SyncReport(num_bytes, clock.seconds["push"], clock.seconds["digest"] + source_s)

    def _take(
        self, buckets: Iterable[WeightBucket], version: int, clock: SyncClock
    ) -> tuple[LaidOut, dict[str, int], float]:
        """Return the adapter in memory of its own, the digest of each matrix, and the exporter's
        seconds. Buckets may lie on any device, and their memory is used again."""
        self._manifest.begin()
        laid_out: LaidOut | None = None
        exported: list[tuple[str, int]] = []
        source_s, complete = 0.0, False
        for bucket in buckets:
            if bucket.version != version:
                raise ValueError(
                    f"update_weights: got a bucket of version {bucket.version}, expected {version}"
                )
            self._manifest.check(bucket)
            for name, matrix in bucket.tensors:
                with clock.part("push"):
                    laid_out = laid_out or self._form.lay_out(matrix.dtype)
                    view = laid_out.views[name]
                    if view.dtype != matrix.dtype:
                        raise ValueError(
                            f"update_weights: {name!r}: got {matrix.dtype}, expected {view.dtype} as "
                            "those before it"
                        )
                    view.copy_(matrix)
            exported += (bucket.digest or {}).items()
            source_s += bucket.digest_s
            complete = bucket.is_last
        self._manifest.check_complete()
        if not complete or laid_out is None:
            raise ValueError("update_weights: the buckets ended without one that says is_last")
        with clock.part("digest"):
            matrices = [(name, laid_out.views[name]) for name in self._manifest.required]
            sums = weight_sums([(matrix, 1) for _, matrix in matrices]).tolist()
            came = {n: s % MODULUS for (n, _), s in zip(matrices, sums, strict=True)}
            check_exported(exported, came)
        return laid_out, came, source_s

    def _load(self, laid_out: LaidOut, version: int) -> None:
        # SGLang keeps adapters in host memory, whatever the device: each rank maps the file.
        handle = file_handle(laid_out.memory.path, laid_out.num_bytes)
        config = self._adapter.peft_config()
        body = {
            "lora_name": adapter_name(version, self._name),
            "config_dict": {**config, "target_modules": sglang_modules(self._adapter)},
            "serialized_named_tensors": serialize_bucket(
                laid_out.places, [handle] * self._num_ranks
            ),
            "load_format": "flattened_bucket",
        }
        with self._changing:
            if version in self._loaded:  # of an idle engine, which got it before
                self._unload(version)
        self._server.post("/load_lora_adapter_from_tensors", body)
        with self._changing:
            self._loaded[version] = adapter_name(version, self._name)
            self._is_base = False

    def _check(self, version: int, came: dict[str, int]) -> None:
        expected = came | dict.fromkeys(self._manifest.zeros, 0)
        sent = {
            wire: digest
            for name, digest in expected.items()
            for wire in self._form.sent_names(name)
        }
        try:
            answer = self._server.post(
                "/weights_checker", {"action": ACTION + adapter_name(version, self._name)}
            )
            check_adapter_held(answer, sent, self._adapter.scale, self._num_ranks)
        except BaseException:
            # What is said now hides no other error.
            with contextlib.suppress(RuntimeError), self._changing:
                self._unload(version)
            raise

    def drop_unused(self, used: Collection[int]) -> None:
        """Make SGLang unload every version but those in `used` and the newest. It would wait for
        requests that still use one. Raises RuntimeError where it refuses."""
        with self._changing:
            for version in list(self._loaded)[:-1]:
                if version not in used:
                    self._unload(version)

    def drop_all(self) -> None:
        """Make SGLang unload every version, when no request uses it any more."""
        with self._changing:
            for version in list(self._loaded):
                self._unload(version)

    def _unload(self, version: int) -> None:
        name = self._loaded.pop(version)
        self._server.post("/unload_lora_adapter", {"lora_name": name})

    def close(self) -> None:
        """Nothing is held between updates."""
