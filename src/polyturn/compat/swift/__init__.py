"""ms-swift's interfaces. After importing this package, `import swift...` finds them if ms-swift itself is not installed."""

from __future__ import annotations

from polyturn.compat import install

install("swift")
