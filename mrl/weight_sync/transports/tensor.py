"""The default, `rollout.weight_sync=tensor`: buckets stay in memory.

An engine on the trainer's devices opens handles to the trainer's buckets. For an engine on separate
ranks, the trainer sends the weights to the engine's worker over a process group, and the engine
opens handles to the worker's memory.
"""

from mrl.engines.sglang.weights.tensor import TensorPush as Push
from mrl.weight_sync.rank_pair import PairReceiver as Receiver
from mrl.weight_sync.rank_pair import PairSender as Sender

__all__ = ["Push", "Receiver", "Sender", "sends_deltas"]

sends_deltas = True
