"""MediaEncoder: a DeltaEncoder whose messages may show images, videos and sounds.

    base        ...<|vision_start|><|image_pad|><|vision_end|> Which color?<|im_end|>...
    here        ...<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|> Which color?<|im_end|>...

Separate because it is one step behind text: the ids are those of the template's text, in which a medium is one token, and
then each of those becomes what the processor makes of its medium. So media are encoded as they come, and the ids equal
those of one pass of the processor over the whole conversation. A placeholder that a text spells is text, never a medium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.arrays import Ids
from polyturn.core.errors import ConfigError
from polyturn.core.messages import Message
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.multimodal import MediaProcessor


class MediaEncoder(DeltaEncoder):
    """Encodes conversations that may show media. Without a processor, one that does is refused."""

    def __init__(
        self, codec: Codec, *, tools: Sequence[Mapping[str, Any]] = (), media: MediaProcessor | None = None, **options: Any
    ) -> None:
        """Make an encoder.

        Args:
            codec: The tokenizer and template.
            tools: The schemas that every render shows.
            media: The model's processor; None for text.
            options: See `DeltaEncoder`.
        """
        super().__init__(codec, tools=tools, **options)
        self.media = media

    def start(self, messages: Sequence[Message], **options: Any) -> Ids:
        """Return the ids of a whole conversation and the generation prompt; see `DeltaEncoder.start`.

        Raises:
            TemplateError: the template cannot render the messages, or writes no placeholder for a medium.
            ConfigError: a message shows media and there is no processor.
            DataError: a medium cannot be processed.
        """
        return self._expand(super().start(messages, **options), messages)

    def full(self, messages: Sequence[Message], **options: Any) -> Ids:
        """Return the ids of a whole conversation without generation prompt; raises as `start`."""
        return self._expand(super().full(messages, **options), messages)

    def extend(self, new: Sequence[Message], *, last_id: int | None, **options: Any) -> Ids:
        """Return the ids that follow a completion; see `DeltaEncoder.extend`. Raises as `start`."""
        return self._expand(super().extend(new, last_id=last_id, **options), new)

    def _expand(self, ids: Ids, messages: Sequence[Message]) -> Ids:
        if self.media is not None:
            return self.media.expand(ids, messages)
        for message in messages:
            if message.media:
                kinds = sorted({medium.kind for medium in message.media})
                raise ConfigError(
                    f"a {message.role} message shows {' and '.join(kinds)} and the run has no processor; use a model that "
                    "comes with one, or name a function that makes one in model.processor"
                )
        return ids
