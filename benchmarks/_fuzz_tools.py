"""The tool of the servers that are fuzzed, in this process and in one of its own."""

import polyturn


@polyturn.tool
def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b
