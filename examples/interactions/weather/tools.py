"""The weather, always fine."""

import polyturn


@polyturn.tool
def get_weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: The city.
    """
    return f"It is sunny in {city}, 20 degrees."
