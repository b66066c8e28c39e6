from golden_server import happened

import polyturn
from polyturn import BaseTool, ToolResponse

BEFORE = {"b": "a", "c": "a", "d": "a c", "e": "a c"}
"""Note -> the notes that its conversation took before it, by the script."""


class Notebook(BaseTool):
    """Keeps the notes of an episode and its forks, and shows those of one conversation."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.notes = {}

    async def create(self, instance_id=None, **kwargs):
        self.notes[instance_id] = []
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.notes[instance_id].append(parameters["text"])
        return ToolResponse(text=" ".join([*BEFORE.get(parameters["text"], "").split(), parameters["text"]])), 0.25, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(sum(note in "abf" for note in self.notes[instance_id]))

    async def release(self, instance_id, **kwargs):
        del self.notes[instance_id]

    async def snapshot(self, instance_id):
        return list(self.notes[instance_id])

    async def restore(self, instance_id, state):
        self.notes[instance_id] = list(state)


class Forks(polyturn.MultiTurnScheduler):
    """Goes on from here and from a mark, one after the other; asks a critic; then two forks side by side."""

    forks = True

    async def on_turn_end(self, episode, turn):
        if "end" in turn.text or "Enough" in turn.text:
            happened()

    async def run(self, episode):
        await episode.prepare()
        first = await episode.generate()
        await self.settle(episode, first)
        mark = episode.mark()
        reason = await self.one(episode)
        again = episode.fork(at=mark)
        await self.one(again)
        critic = episode.fork(agent="critic", messages=[{"role": "user", "content": f"Is {episode.turns[-1].text} right?"}])
        await critic.prepare()
        said = await critic.generate()
        said.scores["critic"] = 0.5
        if episode.task.extra["is_wide"]:
            await self.run_forks([again.fork(), again.fork()])
        return reason

    async def one(self, episode):
        """Take one more turn, and answer it."""
        await episode.prepare()
        turn = await episode.generate()
        return await self.settle(episode, turn) or polyturn_stop()


def polyturn_stop():
    from polyturn.core.lifecycle import StopReason

    return StopReason.STOP


def score(trajectory):
    return len(trajectory.segments) + len(trajectory.turns) / 8
