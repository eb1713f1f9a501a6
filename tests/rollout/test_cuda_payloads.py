"""What an engine on GPUs is posted, read by SGLang's own code; the GPUs themselves are made up.

Real: torch's layout of a shared CUDA tensor, our payloads, SGLang's unpickler with its allow-list, its
choice of the payload by rank, and how it finds the device. Made up: the GPUs, and the call that would
map the memory. In a process of its own, because SGLang patches torch for good: a fork of one that has
imported SGLang.
"""

from __future__ import annotations

import json

from mrl.engines.sglang.process import ServerProcess
from mrl.engines.sglang.settings import server_environment
from tests.engine_starts import run_program

READER = r"""
import inspect, json, sys
from types import SimpleNamespace
import torch
from torch.multiprocessing import reductions
from mrl.engines import handles as engine_handles
from mrl.engines.sglang.weights.tensor import TensorPush
from mrl.types import WeightBucket

fields = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
assert fields[engine_handles.DEVICE_FIELD] == "storage_device", fields

class OnGpu:
    "u8[12] of a trainer rank, on the GPU that this process calls 0."
    is_cuda, device = True, torch.device("cuda", 0)
    def numel(self):
        return 12

def shared(rank):
    "As reduce_tensor returns it for a tensor on GPU 0 of the rank's own process."
    values = dict(
        tensor_cls=torch.Tensor, tensor_size=torch.Size([12]), tensor_stride=(1,), tensor_offset=0,
        storage_cls=torch.storage.TypedStorage, dtype=torch.uint8, storage_device=0,
        storage_handle=b"handle of rank %d" % rank, storage_size_bytes=12, storage_offset_bytes=0,
        requires_grad=False, ref_counter_handle=b"counter", ref_counter_offset=0,
        event_handle=b"event", event_sync_required=True,
    )
    return reductions.rebuild_cuda_tensor, tuple(values[field] for field in fields)

# The trainer's ranks: each makes the handle of its own copy, on its own GPU.
order = []
torch.from_dlpack = lambda flat: flat
torch.cuda.current_stream = lambda device: SimpleNamespace(
    synchronize=lambda: order.append("synchronised"))
handles = []
for rank, uuid in enumerate(("GPU-b", "GPU-a")):
    reductions.reduce_tensor = lambda flat: (order.append("shared"), shared(rank))[1]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuid)
    bucket = WeightBucket([("a", torch.zeros(3))], 1, OnGpu())
    handles.append(engine_handles.handle_of(bucket.flat, None))
posted = []
push = TensorPush(lambda path, body: posted.append(body), 2)
push.push(WeightBucket([("a", torch.zeros(3))], 1, OnGpu(), handles=tuple(handles)))
push.finish()
try:
    push.push(bucket)
    refusal = ""
except RuntimeError as error:
    refusal = str(error)

# One rank alone: a bucket of tensors that lie anywhere, as in benchmarks/gpu_lane.
cat = torch.cat
torch.cat = lambda parts: OnGpu()
alone = TensorPush(lambda path, body: posted.append(body), 1)
alone.push(WeightBucket([("a", torch.zeros(3))], 1))
alone.finish()
torch.cat = cat
assert len(posted[1]["serialized_named_tensors"]) == 1

# The engine's ranks, which see both GPUs in an order of their own.
from sglang.srt.managers import tp_worker
from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda n: SimpleNamespace(uuid=("GPU-a", "GPU-b")[n])
monkey_patch_torch_reductions()
opened = []
reductions._rebuild_cuda_tensor_original = lambda *args: opened.append(dict(zip(fields, args)))
payloads = normalize_serialized_named_tensor_payloads(posted[0]["serialized_named_tensors"])
for rank in range(2):
    tp_worker.get_parallel = lambda: SimpleNamespace(tp_rank=rank)
    metadata = tp_worker.TpModelWorker.deserialize_own_rank(None, payloads)["metadata"]
print(json.dumps({
    "order": order, "opened": [[o["storage_device"], o["storage_handle"].decode()] for o in opened],
    "names": [m.name for m in metadata], "refusal": refusal,
}))
"""


def test_each_rank_opens_its_own_handle_on_its_own_gpu(tmp_path):
    log = tmp_path / "log"
    server = ServerProcess({}, server_environment((), 1), log)
    code = run_program(READER, server._child_environment(log.parent), log)
    assert code == 0, log.read_text()
    said = json.loads(log.read_text().splitlines()[-1])
    assert said["opened"] == [[1, "handle of rank 0"], [0, "handle of rank 1"]]
    assert said["order"] == ["synchronised", "shared"] * 3
    assert said["names"] == ["a"]
    assert "without handles, and the engine spans 2 GPUs" in said["refusal"]
