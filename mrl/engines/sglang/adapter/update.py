"""An update of an adapter, with a proof that every matrix has arrived exactly once.

The base model in the engine never changes. A new version of the adapter is loaded under a name of
its own, while earlier versions stay loaded: requests in flight finish with the version under which
they were sent. A version is unloaded when no request uses it any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable

from mrl.engines.base import SyncReport
from mrl.engines.handles import file_handle
from mrl.engines.sglang.adapter.digests import ACTION, check_adapter_held, check_exported
from mrl.engines.sglang.adapter.layout import AdapterLayout, AdapterMemory
from mrl.engines.sglang.adapter.manifest import AdapterManifest, sglang_modules
from mrl.engines.sglang.body import adapter_name
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.weights.tensor import serialize_bucket
from mrl.engines.sglang.weights.update import SyncClock
from mrl.kernels.digest import MODULUS, weight_sums
from mrl.types import WeightBucket


class AdapterUpdater:
    """Updates an adapter on one server between its start and its stop. A restart needs a new object.

    Only one thread at a time may call update(); the other methods are for any thread.
    """

    def __init__(
        self,
        connection: ServerConnection,
        manifest: AdapterManifest,
        *,
        num_ranks: int,
        name: str = "mrl",
        stacks: bool | None = None,
    ) -> None:
        """The server has `num_ranks` tensor-parallel ranks, all on this machine. `name` is part of the
        names that SGLang uses for the adapter's versions. `stacks` is passed to `AdapterLayout`."""
        self._connection = connection
        self._name = name
        self._adapter = manifest.adapter
        self._num_ranks = num_ranks
        self._manifest = manifest
        shapes = {**manifest.required, **manifest.zeros}
        self._layout = AdapterLayout(shapes, manifest.adapter, stacks=stacks)
        self._loaded: dict[int, str] = {}
        """SGLang's names of the loaded versions, the newest last."""
        self._changing = threading.Lock()
        self._is_base = True

    def name_of(self, version: int) -> str | None:
        """Return SGLang's name of a version; None before the first update, when requests use the base
        model. Raises RuntimeError if the version is not loaded."""
        name = self._loaded.get(version)
        if name is None and not self._is_base:
            raise RuntimeError(
                f"version {version} of the adapter is not loaded, expected one of "
                f"{', '.join(map(str, self._loaded)) or 'none'}"
            )
        return name

    def update(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        """Load a whole adapter, and prove that the engine holds it. After an error, `buckets` may have
        items left; the caller has to drain them if other ranks wait for this one.

        Raises ValueError if a bucket carries another version, matrices have different dtypes, or a
        matrix is missing, unknown, repeated or of another shape. Raises RuntimeError if the received
        matrices differ from those that were exported, if the engine refuses the matrices, or if the
        engine ends up with matrices other than those sent. Versions that were loaded before the update
        stay loaded.
        """
        clock = SyncClock()
        memory, came, source_s = self._take(buckets, version, clock)
        num_bytes = memory.num_bytes - sum(
            memory.views[name].nbytes for name in self._manifest.zeros
        )
        with clock.part("push"):
            self._load(memory, version)
        with clock.part("digest"):
            self._check(version, came)
        return SyncReport(num_bytes, clock.seconds["push"], clock.seconds["digest"] + source_s)

    def _take(
        self, buckets: Iterable[WeightBucket], version: int, clock: SyncClock
    ) -> tuple[AdapterMemory, dict[str, int], float]:
        """Copy the buckets, which may be on any device, into memory for the server. Return this memory,
        the digest of each matrix by name, and the seconds that the exporter spent on digests."""
        memory: AdapterMemory | None = None
        exported: list[tuple[str, int]] = []
        source_s = 0.0
        for bucket in self._manifest.arriving(buckets, version):
            for name, matrix in bucket.tensors:
                with clock.part("push"):
                    memory = memory or self._layout.allocate(matrix.dtype)
                    view = memory.views[name]
                    if view.dtype != matrix.dtype:
                        raise ValueError(
                            f"update_weights: {name!r}: got {matrix.dtype}, expected {view.dtype} as "
                            "those before it"
                        )
                    view.copy_(matrix)
            exported += (bucket.digest or {}).items()
            source_s += bucket.digest_s
        assert memory is not None  # an adapter has matrices, and all of them have come
        with clock.part("digest"):
            matrices = [(name, memory.views[name]) for name in self._manifest.required]
            sums = weight_sums([(matrix, 1) for _, matrix in matrices]).tolist()
            came = {n: s % MODULUS for (n, _), s in zip(matrices, sums, strict=True)}
            check_exported(exported, came)
        return memory, came, source_s

    def _load(self, memory: AdapterMemory, version: int) -> None:
        # SGLang keeps adapters in host memory, also on GPUs: each rank maps the file.
        handle = file_handle(memory.buffer.path, memory.num_bytes)
        config = self._adapter.peft_config()
        body = {
            "lora_name": adapter_name(version, self._name),
            "config_dict": {**config, "target_modules": sglang_modules(self._adapter)},
            "serialized_named_tensors": serialize_bucket(memory.places, [handle] * self._num_ranks),
            "load_format": "flattened_bucket",
        }
        with self._changing:
            if version in self._loaded:  # an idle engine may get a version again
                self._unload(version)
        self._connection.post("/load_lora_adapter_from_tensors", body)
        with self._changing:
            self._loaded[version] = adapter_name(version, self._name)
            self._is_base = False

    def _check(self, version: int, came: dict[str, int]) -> None:
        expected = came | dict.fromkeys(self._manifest.zeros, 0)
        sent = {
            wire: digest
            for name, digest in expected.items()
            for wire in self._layout.sent_names(name)
        }
        try:
            answer = self._connection.post(
                "/weights_checker", {"action": ACTION + adapter_name(version, self._name)}
            )
            check_adapter_held(answer, sent, self._adapter.scale, self._num_ranks)
        except BaseException:
            # An error of the unload must not replace the earlier one.
            with contextlib.suppress(RuntimeError), self._changing:
                self._unload(version)
            raise

    def drop_unused(self, used: Collection[int]) -> None:
        """Make SGLang unload every version except the newest and those in `used`, the versions that
        requests still use. A version in use is kept because SGLang would unload it only after its
        requests have finished, and the call would wait until then. Raises RuntimeError if SGLang
        refuses."""
        with self._changing:
            for version in list(self._loaded)[:-1]:
                if version not in used:
                    self._unload(version)

    def drop_all(self) -> None:
        """Make SGLang unload every version. SGLang waits for the requests that still use a version."""
        with self._changing:
            for version in list(self._loaded):
                self._unload(version)

    def _unload(self, version: int) -> None:
        name = self._loaded.pop(version)
        self._connection.post("/unload_lora_adapter", {"lora_name": name})

    def close(self) -> None:
        """Do nothing: no memory is held between updates."""
