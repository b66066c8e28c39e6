"""A further policy of a run that says what is written, and notes what it was asked."""

from __future__ import annotations

from typing import Any

from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.scripted import ScriptedEngine
from polyturn.partners.policy import FrozenPolicy
from polyturn.testing.episodes import tiny_codec, turn_ids
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import HermesParser


class Speaker(FrozenPolicy):
    """Says one text after another, the last one for ever; an exception in place of a text fails its request."""

    def __init__(
        self,
        *says: str | Exception,
        name: str,
        engine: Any = None,
        version: int = 0,
        max_context: int = 2048,
        **sampling: Any,
    ) -> None:
        self.asked: list[GenerateRequest] = []

        def answer(request: GenerateRequest) -> Any:
            self.asked.append(request)
            text = says[min(len(self.asked), len(says)) - 1]
            return turn_ids(text) if isinstance(text, str) else text

        super().__init__(
            name,
            engine=engine or ScriptedEngine(answer, version=version),
            encoder=DeltaEncoder(tiny_codec()),
            parser=HermesParser(),
            sampling=SamplingParams(**sampling),
            max_context=max_context,
        )

    @property
    def shown(self) -> list[str]:
        """The prompts it was asked with, as text."""
        return [str(tiny_codec().decode(asked.prompt_ids)) for asked in self.asked]
