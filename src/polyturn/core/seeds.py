"""Seeds: each random choice is seeded by the run's seed and its purpose, so the order of choices does not matter."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """Hash the parts to a 63-bit seed, for example derive_seed(run_seed, task, member, turn)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
