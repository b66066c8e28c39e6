"""verl's interfaces. After importing this package, `import verl...` finds them if verl itself is not installed."""

from __future__ import annotations

from polyturn.compat import install
from polyturn.compat.verl.padded_batch import to_dataproto

__all__ = ["to_dataproto"]

install("verl")
