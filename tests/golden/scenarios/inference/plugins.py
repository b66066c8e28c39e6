import polyturn


@polyturn.tool
async def look(name: str) -> str:
    """Look.

    Args:
        name: A name.
    """
    return f"{name}: 4"


class Asks(polyturn.BaseInteraction):
    """Asks why."""

    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        return "stop" in messages[-1]["content"], "Why?", float(len(messages)), {}
