"""Weight buckets by way of SGLang's /update_weights_from_disk: `rollout.weight_sync=disk`.

The slowest of the ways, and the one that needs nothing but a file system that both sides see.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from mrl.rollout.sglang.weights import Post, version_fields
from mrl.types import WeightBucket

PREFIX = "mrl-weights-"


class DiskPush:
    """Writes one safetensors file a bucket; the last one makes the engine read them all."""

    def __init__(self, post: Post, parent: Path | None) -> None:
        """`parent` of the private folder, for this engine alone: what a killed run has left there goes
        now. By default the system's folder for temporary files."""
        self._post = post
        for left in () if parent is None else parent.glob(PREFIX + "*"):
            shutil.rmtree(left, ignore_errors=True)
        self._parent = parent
        self._folder: Path | None = None
        self._num_files = 0

    def push(self, bucket: WeightBucket) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in bucket.tensors}
        try:
            if self._folder is None:
                if self._parent is not None:
                    self._parent.mkdir(exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
            self._num_files += 1
            save_file(tensors, self._folder / f"model-{self._num_files:05d}.safetensors")
        except (OSError, SafetensorError) as error:
            raise RuntimeError(
                f"update_weights: {self._folder or self._parent} cannot be written: {error}; make room "
                "there, or set rollout.weight_sync=tensor"
            ) from None
        if bucket.is_last:
            body = {"model_path": str(self._folder), **version_fields(bucket)}
            # SGLang's rank 0 answers when it is through itself; others may still read.
            self._post("/update_weights_from_disk", body)

    def finish(self) -> None:
        """push() has written the files, and waited for the engine after the last one."""

    def settle(self) -> None:
        """Every rank has said what it holds: the files are read."""
        self.close()

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._num_files = None, 0
