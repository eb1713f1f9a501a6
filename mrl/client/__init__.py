"""The client of a service: a training loop of your own in Python, on its base model and engine.

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
