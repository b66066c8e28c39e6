"""A taskset of verifiers 0.4: add two numbers; right is worth 1."""

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: int


class Add(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)


class AddConfig(vf.TasksetConfig):
    num: int = 3


class AddTaskset(vf.Taskset[Add, AddConfig]):
    def load(self):
        for i in range(self.config.num):
            yield Add(Sum(idx=i, prompt=f"What is {i} + 7?", answer=i + 7), self.config.task)


__all__ = ["AddTaskset"]
