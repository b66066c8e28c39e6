"""ServedMedia: convert prompts with images for a server, which has its own processor.

    here    … <|vision_start|> <|image_pad|> <|image_pad|> <|image_pad|> <|vision_end|> …       the model's ids
    sent    … <|vision_start|> <|image_pad|> <|vision_end|> …   and  "data:image/png;base64,…"
    there   … expanded again by the server, which returns the ids; other ids are an error

So training uses the prompt that was sampled from, even if the server's processor has other settings than the trainer's.
"""

from __future__ import annotations

import base64
import hashlib
import mimetypes
from typing import NamedTuple

from polyturn.core.arrays import Ids
from polyturn.core.errors import DataError, EngineError, TemplateError
from polyturn.core.generation import GenerateRequest
from polyturn.core.media import a_kind, read_source
from polyturn.tokens.multimodal import MediaProcessor


class SentPrompt(NamedTuple):
    """A prompt for a server that expands placeholders."""

    ids: Ids
    """[T] the ids, with one placeholder per medium."""
    uris: tuple[str, ...] = ()
    """A data URI per medium."""
    keys: tuple[str, ...] = ()
    """A cache key per medium for the server; equal exactly for equal images."""


class ServedMedia:
    """Makes the prompts for servers, for one model and its processor."""

    def __init__(self, processor: MediaProcessor | None) -> None:
        self._processor = processor

    @property
    def is_there(self) -> bool:
        """Whether images can be sent."""
        return self._processor is not None

    def prompt(self, request: GenerateRequest) -> SentPrompt:
        """Return a request's prompt in the form for servers; text is unchanged.

        Raises:
            EngineError: it has media other than images, or its ids differ from the processor's expansion.
        """
        if self._processor is None or not request.media:
            return SentPrompt(request.prompt_ids)
        for medium in request.media:
            if medium.kind != "image":
                raise EngineError(
                    f"request {request.request_id!r} shows {a_kind(medium.kind)}, and served engines support only "
                    "images; use engine.kind: embedded"
                )
        try:
            ids = self._processor.collapse(request.prompt_ids, request.media)
            uris = tuple(_data_uri(str(medium.source)) for medium in request.media)
        except (TemplateError, DataError) as problem:
            raise EngineError(f"request {request.request_id!r}: {problem}") from problem
        return SentPrompt(ids, uris, tuple(hashlib.blake2b(uri.encode(), digest_size=16).hexdigest() for uri in uris))

    def check(self, request: GenerateRequest, is_same: bool, *, url: str) -> None:
        """Raise if a server expanded the images to other ids.

        Raises:
            EngineError: `is_same` is false.
        """
        if not is_same:
            raise EngineError(
                f"{url} expanded the {len(request.media)} images of request {request.request_id!r} to other tokens "
                "than the trainer's processor; give the server the same processor (preprocessor_config.json)"
            )


def _data_uri(source: str) -> str:
    if source.startswith("data:"):
        return source
    kind = mimetypes.guess_type(source)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(read_source(source)).decode('ascii')}"
