"""Client library of a service. With it, your own training loop in Python uses the service's base model
and engine.

docs/client.md explains how. The client needs neither torch nor a GPU.
"""

from mrl.client.data import Datum, Sample
from mrl.client.futures import Future, OperationFailed, OperationLost, PromptLogprobs
from mrl.client.session import ServiceClient, Session

__all__ = [
    "Datum",
    "Future",
    "OperationFailed",
    "OperationLost",
    "PromptLogprobs",
    "Sample",
    "ServiceClient",
    "Session",
]
