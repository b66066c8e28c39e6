from golden_model import processor as processor
from PIL import Image

from polyturn import BaseInteraction, BaseTool, ToolResponse


def picture(color):
    return Image.new("RGB", (56, 56), color)


class Look(BaseTool):
    """Shows a picture."""

    stateless = True

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=f"Here is {parameters['name']}.", image=[picture(parameters["name"])])


class Painter(BaseInteraction):
    """Shows another picture."""

    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        said = [{"type": "image", "image": picture(kwargs["then"])}, {"type": "text", "text": "And this?"}]
        return messages[-1]["content"] == kwargs["then"], said, 0.5, {}


def score(trajectory):
    return float(len(trajectory.turns))
