from polyturn import BaseInteraction, BaseTool, ToolResponse


class Notebook(BaseTool):
    """Keeps notes, and says how they survive."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.notes = {}

    async def create(self, instance_id=None, **kwargs):
        self.notes[instance_id] = []
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.notes[instance_id].append(parameters["text"])
        return ToolResponse(text=" ".join(self.notes[instance_id])), 0.25, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(len(self.notes[instance_id]))

    async def release(self, instance_id, **kwargs):
        del self.notes[instance_id]

    async def snapshot(self, instance_id):
        return list(self.notes[instance_id])

    async def restore(self, instance_id, state):
        self.notes[instance_id] = list(state)


class Asks(BaseInteraction):
    """Asks for more."""

    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        return "stop" in messages[-1]["content"], "More?", len(messages) / 8, {"num": len(messages)}
