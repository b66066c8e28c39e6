"""verl's interfaces. Importing this package lets `import verl...` find them, where verl itself is not installed."""

from __future__ import annotations

from polyturn.compat import install
from polyturn.compat.verl.dataproto import to_dataproto

__all__ = ["to_dataproto"]

install("verl")
