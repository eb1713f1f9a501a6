"""The private names of torch that mrl uses or replaces, in the table `TORCH`.

torch may change these names in any release. Code takes a function or a class by its key, such as
`TORCH.take("_world")`, so only one line here changes when torch moves a name. Attributes of
objects, such as `storage._cdata`, are listed in the entry of their class, and code reads them as
usual. Some listed names look public but are not documented.

A test resolves every name in the installed torch. It fails if code uses a private name that this
table does not list, or if the table has an entry that no code uses.
"""

from __future__ import annotations

from functools import partial

from mrl.system.releases import Name, NameTable, since

always = partial(since, "2.11")
"""A function that returns a Name with the same path in all releases of torch that mrl was tested
with, 2.11 to 2.14."""
_C10D, _DCP = "torch.distributed.distributed_c10d", "torch.distributed.checkpoint"

NAMES: dict[str, Name] = {
    # mrl/watch/collectives.py replaces methods of both.
    "ProcessGroup": always(
        "torch._C._distributed_c10d.ProcessGroup", attributes=("group_desc", "size")
    ),
    "Work": always("torch._C._distributed_c10d.Work", attributes=("wait", "is_completed")),
    # mrl/weight_sync/pair_group.py
    "ProcessGroupGloo._Options": always(
        "torch.distributed.ProcessGroupGloo._Options", attributes=("_timeout", "_devices")
    ),
    "ProcessGroupNCCL.Options": always(
        "torch.distributed.ProcessGroupNCCL.Options", attributes=("_timeout",)
    ),
    # mrl/engines/handles.py writes the device's UUID where torch writes its number.
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
    # parallel/cpu_mode.py replaces these on a machine without CUDA.
    **{
        f"cuda.{name}": always(f"torch.cuda.{name}")
        for name in ("synchronize", "current_device", "Stream", "current_stream", "default_stream",
                     "stream", "set_device")
    },
    "_device_constructors": always("torch.utils._device._device_constructors"),
    # parallel/ledger.py
    "UntypedStorage": always("torch.UntypedStorage", attributes=("_cdata",)),
    # parallel/checkpoint; pickle_scan.py allows checkpoints to name three of these.
    "PyTorchFileReader": always(
        "torch._C.PyTorchFileReader", attributes=("get_all_records", "get_record")
    ),
    "_validate_global_plan": always(f"{_DCP}.default_planner._validate_global_plan"),
    "_StorageInfo": always(f"{_DCP}.filesystem._StorageInfo"),
    "_StoragePrefix": always(f"{_DCP}.filesystem._StoragePrefix"),
    "_MEM_FORMAT_ENCODING": always(f"{_DCP}.metadata._MEM_FORMAT_ENCODING"),
    "_get_layout": always("torch.serialization._get_layout"),
}  # fmt: skip
TORCH = NameTable("torch", NAMES)
