from golden_model import processor as processor
from PIL import Image

import polyturn


class GoesOn(polyturn.MultiTurnScheduler):
    """Goes on behind completions that were cut, as those of a model of random numbers are."""

    stateless = True

    def check_finished(self, episode, turn):
        return None


class Painter(polyturn.BaseInteraction):
    """Shows another picture, of another size."""

    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        image = Image.new("RGB", (84, 56), kwargs["then"])
        return False, [{"type": "image", "image": image}, {"type": "text", "text": "And this?"}], 0.0, {}


def score(trajectory):
    return len(set(trajectory.turns[0].message.text)) / 8
