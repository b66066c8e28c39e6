"""Seeds: each random choice has its own seed, a hash of its purpose and the run's seed, so their order does not matter."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """Hash the parts to a 63-bit seed, for example derive_seed(run_seed, task, member, turn)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
