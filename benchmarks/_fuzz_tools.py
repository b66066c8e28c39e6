"""The tool of the fuzzed servers, in this process and in another."""

import polyturn


@polyturn.tool
def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b
