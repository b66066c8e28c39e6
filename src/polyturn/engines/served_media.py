"""ServedMedia: images on their way to a server, which has a processor of its own.

    here    … <|vision_start|> <|image_pad|> <|image_pad|> <|image_pad|> <|vision_end|> …       as the model reads them
    sent    … <|vision_start|> <|image_pad|> <|vision_end|> …   and  "data:image/png;base64,…"
    there   … expanded again by the server, which says to what: the same ids, or the answer is refused

So what is trained stays what was sampled from, also where a server's processor is set otherwise than the trainer's.
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
    """A prompt as a server that expands it wants it."""

    ids: Ids
    """Each medium is one placeholder."""
    uris: tuple[str, ...] = ()
    """A data URI for each."""
    keys: tuple[str, ...] = ()
    """A name for each by which a server may keep what it made of it: equal for equal images, and for no others."""


class ServedMedia:
    """Makes the prompts that are sent, for one model and its processor."""

    def __init__(self, processor: MediaProcessor | None) -> None:
        self._processor = processor

    @property
    def is_there(self) -> bool:
        """Whether images can be sent at all."""
        return self._processor is not None

    def prompt(self, request: GenerateRequest) -> SentPrompt:
        """Return a request's prompt as it is sent; text goes as it is.

        Raises:
            EngineError: it shows something else than images, or its ids are not what the processor makes of them.
        """
        if self._processor is None or not request.media:
            return SentPrompt(request.prompt_ids)
        for medium in request.media:
            if medium.kind != "image":
                raise EngineError(
                    f"request {request.request_id!r} shows {a_kind(medium.kind)}, and served engines are sent images only; "
                    "use engine.kind: embedded"
                )
        try:
            ids = self._processor.collapse(request.prompt_ids, request.media)
            uris = tuple(_data_uri(str(medium.source)) for medium in request.media)
        except (TemplateError, DataError) as problem:
            raise EngineError(f"request {request.request_id!r}: {problem}") from problem
        return SentPrompt(ids, uris, tuple(hashlib.blake2b(uri.encode(), digest_size=16).hexdigest() for uri in uris))

    def check(self, request: GenerateRequest, is_same: bool, *, url: str) -> None:
        """Refuse the answer of a server that made something else of the images.

        Raises:
            EngineError: `is_same` is false.
        """
        if not is_same:
            raise EngineError(
                f"{url} made other tokens of the {len(request.media)} images of request {request.request_id!r} than the "
                "trainer's processor; give the server the same processor (preprocessor_config.json)"
            )


def _data_uri(source: str) -> str:
    if source.startswith("data:"):
        return source
    kind = mimetypes.guess_type(source)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(read_source(source)).decode('ascii')}"
