"""ms-swift's interfaces. Importing this package lets `import swift...` find them, where ms-swift itself is not installed."""

from __future__ import annotations

from polyturn.compat import install

install("swift")
