"""Every name that mrl takes from inside torch, and every one that it replaces there.

torch keeps none of these stable. A test resolves them in the installed torch, and finds uses in mrl's
rooms that are not here.
"""

from __future__ import annotations

from functools import partial

from mrl.system.releases import Name, since

always = partial(since, "2.11")
"""A name that has the same path in all releases that mrl has met: 2.11 to 2.14."""
_C10D, _DCP = "torch.distributed.distributed_c10d", "torch.distributed.checkpoint"

NAMES: dict[str, Name] = {
    # mrl/watch/collectives.py replaces their methods.
    "ProcessGroup": always(
        "torch._C._distributed_c10d.ProcessGroup",
        attributes=("allreduce", "_allgather_base", "_reduce_scatter_base", "group_desc", "size"),
    ),
    "Work": always("torch._C._distributed_c10d.Work", attributes=("wait", "is_completed")),
    # mrl/disaggregated/pair.py, mrl/rollout/sglang/weights_distributed.py
    "ProcessGroupGloo._Options": always(
        "torch.distributed.ProcessGroupGloo._Options", attributes=("_timeout", "_devices")
    ),
    "ProcessGroupNCCL.Options": always(
        "torch.distributed.ProcessGroupNCCL.Options", attributes=("_timeout",)
    ),
    # mrl/rollout/engine_group.py puts the device's UUID in the place of its number.
    "reduce_tensor": always("torch.multiprocessing.reductions.reduce_tensor", "tensor"),
    "rebuild_cuda_tensor": always(
        "torch.multiprocessing.reductions.rebuild_cuda_tensor",
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype",
        "storage_device",
    ),
    # mrl/kernels/digest.py
    "_foreach_copy_": always("torch._foreach_copy_"),
    # parallel/mesh.py
    "_world": always(f"{_C10D}._world", attributes=("pg_map",)),
    "_set_pg_timeout": always(f"{_C10D}._set_pg_timeout", "timeout", "group"),
    # parallel/cpu_mode.py replaces them where there is no CUDA.
    "torch.cuda": always(
        "torch.cuda",
        attributes=("synchronize", "current_device", "Stream", "current_stream", "default_stream",
                    "stream", "set_device"),
    ),
    # parallel/ledger.py
    "UntypedStorage": always("torch.UntypedStorage", attributes=("_cdata",)),
    # parallel/layers/experts.py
    "DisableTorchFunction": always("torch._C.DisableTorchFunction"),
    # parallel/checkpoint
    "PyTorchFileReader": always(
        "torch._C.PyTorchFileReader", attributes=("get_all_records", "get_record")
    ),
    "_validate_global_plan": always(f"{_DCP}.default_planner._validate_global_plan"),
    "_StorageInfo": always(f"{_DCP}.filesystem._StorageInfo"),
    "_StoragePrefix": always(f"{_DCP}.filesystem._StoragePrefix"),
    "_MEM_FORMAT_ENCODING": always(f"{_DCP}.metadata._MEM_FORMAT_ENCODING"),
    "_get_layout": always("torch.serialization._get_layout"),
}  # fmt: skip
