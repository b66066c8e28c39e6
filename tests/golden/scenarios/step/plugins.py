import polyturn


class GoesOn(polyturn.MultiTurnScheduler):
    """Goes on behind completions that were cut, as those of a model of random numbers are."""

    stateless = True

    def check_finished(self, episode, turn):
        return None


class Asks(polyturn.BaseInteraction):
    """Asks for more."""

    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "More?", 0.25, {}


def score(trajectory):
    return len(set(trajectory.turns[0].message.text)) / 8
