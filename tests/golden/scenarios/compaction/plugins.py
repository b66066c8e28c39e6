import polyturn


class Asks(polyturn.BaseInteraction):
    """Asks four questions."""

    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        said = sum(m["role"] == "assistant" for m in messages)
        return (
            "stop" in messages[-1]["content"],
            f"What is the price of number {said}?",
            len(messages[-1]["content"]) / 64,
            {},
        )
