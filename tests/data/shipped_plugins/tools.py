"""Tools without state."""

import polyturn


@polyturn.tool
def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"{a + b:g}"


@polyturn.tool
def get_weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: The city.
    """
    return f"It is sunny in {city}, 20 degrees."
