"""A client brings a training loop of its own, in Python, to the base model and engine of a service.

docs/client.md explains it. Neither torch nor a GPU is needed here.
"""

from mrl.client.data import Datum, Sample
from mrl.client.session import Future, OperationFailed, OperationLost, ServiceClient, Session

__all__ = [
    "Datum",
    "Future",
    "OperationFailed",
    "OperationLost",
    "Sample",
    "ServiceClient",
    "Session",
]
