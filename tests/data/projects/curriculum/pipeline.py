"""A curriculum over three interactions: easy problems with a patient user first, one attempt at hard ones at the end.

    epochs 0 to 4    basic_math         sums; a wrong answer may be tried again
    epochs 5 to 9    advanced_math      products; the user hints at where the answer lies
    epochs 10 on     competition_math   both at once; one attempt

Every row names its interaction; `Stages` chooses the rows of each epoch.
"""

from __future__ import annotations

import random
import re
from typing import Any

import polyturn
from polyturn.data.sampler import Curriculum
from polyturn.interactions.gsm8k import Gsm8kInteraction

STAGES = {0: "basic_math", 5: "advanced_math", 10: "competition_math"}
"""The epoch in which each stage begins."""


class AdvancedMathInteraction(Gsm8kInteraction):
    """Says whether a wrong answer is too large or too small, where its config allows hints."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        ends, said, score, info = await super().generate_response(instance_id, messages, **kwargs)
        answered = re.findall(r"#### (-?\d+)", str(messages[-1].get("content")))
        if ends or not answered or not self.config.get("allow_hints"):
            return ends, said, score, info
        side = "smaller" if int(answered[-1]) > int(kwargs["ground_truth"]) else "larger"
        return False, f"{said} The right answer is {side}.", score, {"hint": side}


class CompetitionMathInteraction(Gsm8kInteraction):
    """Takes one answer."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        _, said, score, info = await super().generate_response(instance_id, messages, **kwargs)
        return True, said, score, info


class Stages(Curriculum):
    """Each epoch has the tasks of its stage, and no others."""

    def choose(self, epoch: int) -> list[int]:
        stage = STAGES[max(begin for begin in STAGES if begin <= epoch)]
        return [i for i, task in enumerate(self.tasks) if task.interaction is not None and task.interaction.name == stage]


def tasks(seed: int, num_per_stage: int) -> list[polyturn.Task]:
    """Return `num_per_stage` tasks for each of the three interactions."""
    rng = random.Random(f"curriculum-{seed}")
    found = []
    for stage in STAGES.values():
        for number in range(num_per_stage):
            a, b, c = (rng.randint(2, 9) for _ in range(3))
            expression, answer = {
                "basic_math": (f"{a} + {b}", a + b),
                "advanced_math": (f"{a} * {b}", a * b),
                "competition_math": (f"{a} * {b} + {c}", a * b + c),
            }[stage]
            found.append(
                polyturn.Task(
                    id=f"{stage}-{number}",
                    prompt=(polyturn.Message(role="user", content=f"What is {expression}? Answer as #### number."),),
                    ground_truth=str(answer),
                    interaction=polyturn.InteractionRef(name=stage, kwargs={"name": stage, "ground_truth": str(answer)}),
                )
            )
    return found
