"""A tool without state."""

import polyturn


@polyturn.tool
def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"{a + b:g}"
