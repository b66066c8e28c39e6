import polyturn


class Clerk(polyturn.BaseInteraction):
    """Says what is wrong until the price is right; fails when it is shouted at."""

    def __init__(self, config):
        super().__init__(config)
        self.tries = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        instance_id = await super().start_interaction(instance_id)
        self.tries[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.tries[instance_id] += 1
        said = messages[-1]["content"]
        if "!" in said:
            raise RuntimeError("do not shout")
        if kwargs["price"] in said:
            return True, "Thank you.", 1.0, {"tries": self.tries[instance_id]}
        return self.tries[instance_id] == self.config["patience"], "Look again.", -0.25, {"heard": len(messages)}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.5

    async def finalize_interaction(self, instance_id=None, **kwargs):
        del self.tries[instance_id]
