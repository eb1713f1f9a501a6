"""`rollout.weight_sync=disk`: buckets in files, through SGLang's /update_weights_from_disk.

This method is the slowest, but requires only a file system that trainer and engine share.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from mrl.engines.sglang.weights.base import Post, version_fields
from mrl.types import WeightBucket

PREFIX = "mrl-weights-"


class DiskPush:
    """Writes one safetensors file for each bucket. After the last bucket the engine reads all files."""

    needs_session = False

    def __init__(self, post: Post, num_ranks: int, folder: Path | None) -> None:
        """Files go into a new folder inside `folder`. Only this engine uses `folder`, and files that a
        killed run left there are deleted. If `folder` is None, the new folder is inside the system's
        folder for temporary files."""
        self._post = post
        for left in () if folder is None else folder.glob(PREFIX + "*"):
            shutil.rmtree(left, ignore_errors=True)
        self._parent = folder
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
            # SGLang's rank 0 answers when it has read the files; the others may still be reading.
            self._post("/update_weights_from_disk", body)

    def finish(self) -> None:
        """Do nothing: push() has written the files, and after the last bucket waited for the engine."""

    def settle(self) -> None:
        """Delete the files, which all ranks have read."""
        self.close()

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._num_files = None, 0
