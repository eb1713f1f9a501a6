from ... import empty_class as __getattr__  # noqa: F401
from .. import InterpolationMode  # noqa: F401
