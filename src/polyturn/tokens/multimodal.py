"""MediaProcessor: runs a model's processor on one image, video or sound at a time, and caches the results.

    template   ... <|vision_start|><|image_pad|><|vision_end|> What is this?                        one placeholder per image
    ids        ... <|vision_start|><|image_pad|> x 4<|vision_end|> What is this?                    one per image feature
    inputs     {"pixel_values": [16, 1176], "image_grid_thw": [1, 3]}                               inputs of the model

The code is the same for all model families: to find the tokens and inputs of a medium, it runs the processor on a text that
consists of one placeholder. The inputs of a conversation are the inputs of its media, concatenated in message order. They
equal those of one pass over the whole conversation, so each medium can be processed when it arrives.

If a tool, a user or the model writes the text of a placeholder, it stays text: the encoder does not let it become the token.
If the template writes another number of placeholders than there are media, that is an error.
"""

from __future__ import annotations

import functools
import io
import threading
import wave
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, DataError, TemplateError, one_line
from polyturn.core.media import KINDS, Media, a_kind, as_samples, read_source, show
from polyturn.core.messages import Message
from polyturn.infra.aio import OneThread
from polyturn.tokens.hub import only_cached

if TYPE_CHECKING:
    from polyturn.tokens.codec import Codec

_TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids"})
"""Outputs of a processor that describe the text; all other outputs describe the media."""
_PARTS = {"image": ("image_processor",), "video": ("video_processor",), "audio": ("feature_extractor", "audio_processor")}
MAX_PIXELS = 1 << 25
"""Largest number of pixels of an image: about 100 MB after decoding."""
MAX_FRAME_PIXELS = 4 * MAX_PIXELS
"""Largest number of pixels of all frames of a video together."""
MAX_SCANS = 100
"""Largest number of scans of a JPEG file. Decoding each scan goes over all pixels, so a small file with many scans could
take very long. Usual files have about ten."""
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""The accepted formats, which Pillow decodes itself. PostScript, for example, is not accepted, because Pillow would start a
program that executes the file."""
_ARGUMENT = {"image": "images", "video": "videos", "audio": "audio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """The placeholder of one kind of media in text."""

    text: str
    """The text that the template writes for a medium."""
    id: int
    """The token id of `text`."""
    feature_ids: tuple[int, ...]
    """The ids in an expansion that the model replaces by features; usually just `id`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expansion:
    """The expansion of one medium to tokens and inputs."""

    ids: Ids
    """The tokens that replace the placeholder."""
    num_features: int
    """Number of those tokens that the model replaces by features."""
    inputs: Mapping[str, Any]
    """name -> tensor, the model's inputs for this medium."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs in memory."""
        return sum(int(t.numel() * t.element_size()) for t in self.inputs.values())


class MediaProcessor:
    """Runs a transformers processor on one medium at a time. Safe to share between episodes and threads."""

    def __init__(self, processor: Any, codec: Codec, *, max_cached_bytes: int = 256 * 2**20) -> None:
        """Wrap a processor.

        Args:
            processor: A transformers processor with a tokenizer.
            codec: The run's tokenizer and template.
            max_cached_bytes: Size of the cache of processed media. With the cache, an image is processed only once for the
                members of a group, the engine and the trainer.

        Raises:
            ConfigError: the processor handles no kind of media, or its placeholder is not a token of the tokenizer.
        """
        self.processor = processor
        self.codec = codec
        self.placeholders: dict[str, Placeholder] = {}
        """Kind -> placeholder, for every kind that the processor handles."""
        self._refusals: dict[str, str] = {}
        for kind in KINDS:
            reason = self._read_kind(kind)
            if reason is not None:
                self._refusals[kind] = reason
        if not self.placeholders:
            raise ConfigError(
                f"the processor {self._name} handles no media: {'; '.join(self._refusals.values())}. Use the processor that "
                "belongs to the model, or leave model.processor out for text"
            )
        self._type_of = np.zeros(codec.vocab_size, np.int8)
        for number, kind in enumerate(KINDS, start=1):
            if kind in self.placeholders:
                self._type_of[list(self.placeholders[kind].feature_ids)] = number
        self._max_cached_bytes = max_cached_bytes
        self._cache: OrderedDict[Media, Expansion] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._thread = OneThread("polyturn-media")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that may occur only in expansions; an engine must not sample them."""
        return tuple(sorted({i for p in self.placeholders.values() for i in (p.id, *p.feature_ids)}))

    def check(self, media: Sequence[Media], *, where: str) -> None:
        """Refuse media that the processor cannot handle.

        Args:
            media: The media.
            where: The source of the media, for the error message.

        Raises:
            DataError: the processor does not support a kind, or a file does not exist.
        """
        for medium in media:
            if medium.kind not in self.placeholders:
                raise DataError(f"{where} shows {a_kind(medium.kind)}, but {self._refusals[medium.kind]}")
            for source in (medium.source,) if isinstance(medium.source, str) else medium.source:
                if not source.startswith("data:") and not Path(source).is_file():
                    raise DataError(f"{where} shows {a_kind(medium.kind)}, but there is no file {source!r}")

    def expansion(self, medium: Media) -> Expansion:
        """Return the processor's ids and inputs for one medium.

        Raises:
            DataError: the processor does not support the kind, or fails on the medium.
        """
        with self._lock:
            cached = self._cache.get(medium)
            if cached is not None:
                self._cache.move_to_end(medium)
                return cached
        self.check([medium], where="a message")
        expansion = self._process(medium)  # without the lock: it may take seconds, and doing it twice does no harm
        with self._lock:
            if medium not in self._cache and expansion.num_bytes <= self._max_cached_bytes:
                self._cache[medium] = expansion
                self._cached_bytes += expansion.num_bytes
                while self._cached_bytes > self._max_cached_bytes:
                    self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return expansion

    async def prepare(self, messages: Sequence[Message]) -> None:
        """Process the media of messages in a thread and cache them, so that encoding does not block the event loop.

        Raises:
            DataError: see `expansion`.
        """
        for medium in (medium for message in messages for medium in message.media):
            if medium not in self._cache:
                await self._thread.submit(functools.partial(self.expansion, medium))

    def expand(self, ids: Ids, messages: Sequence[Message]) -> Ids:
        """Replace each placeholder in `ids` by the expansion of its medium; the i-th placeholder stands for the i-th medium.

        Text at the edges of an expansion is encoded together with the text next to it, as in one pass over the whole text.

        Raises:
            TemplateError: the template wrote another number of placeholders than the messages have media.
            DataError: a medium cannot be processed.
        """
        media = [m for message in messages for m in message.media]
        positions = np.flatnonzero(np.isin(ids, [p.id for p in self.placeholders.values()]))
        if not media and not len(positions):
            return ids
        kinds = [self._kind_of_id(int(ids[p])) for p in positions]
        self.check(media, where="a message")
        if kinds != [m.kind for m in media]:
            raise TemplateError(
                f"the chat template writes the media placeholders {kinds} for messages that show "
                f"{[m.kind for m in media]}; use a template that writes one for each, in their order"
            )
        pieces: list[Ids] = []
        start = 0
        for position, medium in zip(positions.tolist(), media, strict=True):
            pieces += [ids[start:position], self.expansion(medium).ids]
            start = position + 1
        pieces.append(ids[start:])
        return ids_array(np.concatenate(self._merge_edges(pieces)))

    def collapse(self, ids: Ids, media: Sequence[Media]) -> Ids:
        """Undo `expand`: replace the expansion of each medium in `ids` by its placeholder.

        Raises:
            TemplateError: `ids` does not contain the exact expansion of a medium.
            DataError: a medium cannot be processed.
        """
        pieces: list[Ids] = []
        start = 0
        for number, medium in enumerate(media, start=1):
            wanted = self.expansion(medium).ids
            at = _find(ids, wanted, start)
            if at is None:
                raise TemplateError(
                    f"the {len(ids)} tokens do not contain the {len(wanted)} that the processor {self._name} makes of "
                    f"{a_kind(medium.kind)} (number {number} of {len(media)})"
                )
            pieces += [ids[start:at], ids_array([self.placeholders[medium.kind].id])]
            start = at + len(wanted)
        return ids_array(np.concatenate([*pieces, ids[start:]]))

    def inputs(self, media: Sequence[Media]) -> dict[str, Any]:
        """Return the model's inputs for `media`, concatenated in order: name -> tensor.

        Raises:
            DataError: a medium cannot be processed, or the inputs of several media cannot be concatenated.
        """
        import torch

        columns: dict[str, list[Any]] = {}
        for medium in media:
            for name, value in self.expansion(medium).inputs.items():
                columns.setdefault(name, []).append(value)
        try:
            return {name: torch.cat(values) for name, values in columns.items()}
        except RuntimeError as problem:
            raise DataError(
                f"the processor {self._name} makes inputs of different shapes ({one_line(problem)}), which cannot be "
                "joined; resize the media to one size"
            ) from problem

    def types(self, ids: Ids) -> NDArray[np.int8]:
        """Return [T] the type of each token: 0 for text, 1 for features of an image, 2 of a video, 3 of a sound."""
        return self._type_of[ids]

    def shown(self, ids: Ids, media: Sequence[Media]) -> int:
        """Return the number of `media` whose expansion is in the prefix `ids`.

        Raises:
            TemplateError: the prefix ends inside a medium.
        """
        types = self.types(ids)
        left = {kind: int((types == number).sum()) for number, kind in enumerate(KINDS, start=1)}
        count = 0
        for medium in media:
            if not any(left.values()):
                break
            left[medium.kind] -= self.expansion(medium).num_features
            count += 1
        if any(left.values()):
            raise TemplateError(
                f"{len(ids)} tokens hold features for other media than the {len(media)} that belong to them ({left}); a "
                "media token was sampled or written as text, or the tokens were cut inside a medium"
            )
        return count

    # Processing of one medium.

    @property
    def _name(self) -> str:
        return type(self.processor).__name__

    def _read_kind(self, kind: str) -> str | None:
        """Find and store the placeholder of a kind. Return None on success, else the reason as text for an error message."""
        if all(_attribute(self.processor, part) is None for part in _PARTS[kind]):
            return f"the processor {self._name} has no {_PARTS[kind][0]}"
        text = _attribute(self.processor, f"{kind}_token")
        if not text:
            return f"the processor {self._name} has no {kind}_token"
        token = self.codec.tokenizer.convert_tokens_to_ids(str(text))
        if token is None or int(token) not in self.codec.control_tokens:
            return f"the {kind} token {str(text)!r} of the processor {self._name} is not a token of the tokenizer"
        features = [i for i in _attribute(self.processor, f"{kind}_token_ids") or [token] if i is not None]
        self.placeholders[kind] = Placeholder(text=str(text), id=int(token), feature_ids=tuple(int(i) for i in features))
        return None

    def _kind_of_id(self, token: int) -> str:
        return next(kind for kind, p in self.placeholders.items() if p.id == token)

    def _process(self, medium: Media) -> Expansion:
        placeholder = self.placeholders[medium.kind]
        try:
            out = self.processor(
                text=[placeholder.text],
                **{_ARGUMENT[medium.kind]: [self._load(medium)]},
                return_tensors="pt",
                add_special_tokens=False,
            )
        except DataError:
            raise
        except Exception as problem:
            raise DataError(
                f"the processor {self._name} cannot process {a_kind(medium.kind)}: {one_line(problem)}"
            ) from problem
        ids = ids_array(out["input_ids"][0].numpy().astype(np.int32))
        num_features = int(np.isin(ids, placeholder.feature_ids).sum())
        if not num_features:
            raise DataError(f"the processor {self._name} gives {a_kind(medium.kind)} no tokens")
        inputs = {name: value for name, value in out.items() if name not in _TEXT_OUTPUTS}
        return Expansion(ids=ids, num_features=num_features, inputs=inputs)

    def _load(self, medium: Media) -> Any:
        source = medium.source
        if medium.kind == "image":
            return load_image(str(source))
        if medium.kind == "video":
            return source if isinstance(source, str) else _load_frames(source)
        samples, rate = load_samples(str(source))
        extractor = next(p for p in (_attribute(self.processor, name) for name in _PARTS["audio"]) if p is not None)
        wanted = _attribute(extractor, "sampling_rate")
        if rate is not None and wanted is not None and rate != wanted:
            raise DataError(
                f"a sound has {rate} samples a second and the processor {self._name} takes {wanted}; resample it"
            )
        return samples

    def _merge_edges(self, pieces: list[Ids]) -> list[Ids]:
        """Encode the text on both sides of each border between `pieces` again as one text, if both sides have text."""
        out = [pieces[0]]
        for piece in pieces[1:]:
            before, after = out[-1], piece
            tail, head = len(before) - self._plain_run(before[::-1]), self._plain_run(after)
            if tail < len(before) and head:
                text = self.codec.decode(before[tail:]) + self.codec.decode(after[:head])
                out[-1], piece = before[:tail], ids_array(np.concatenate([self.codec.encode_plain(text), after[head:]]))
            out.append(piece)
        return out

    def _plain_run(self, ids: Ids) -> int:
        """Return the number of leading ids that are not control tokens."""
        control = np.isin(ids, list(self.codec.control_tokens))
        return int(control.argmax()) if control.any() else len(ids)


def load_image(source: str) -> Any:
    """Load a source as a Pillow image in RGB.

    Raises:
        DataError: the source is not an image, or Pillow is not installed.
    """
    return decode_image(read_source(source), what=show(source))


def decode_image(data: bytes, *, what: str) -> Any:
    """Decode the bytes of an image file to a Pillow image in RGB, after checking format and size in its header.

    Raises:
        DataError: the format or size is not allowed, the file is damaged, or Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as problem:
        raise DataError("images need Pillow; install the extra: pip install 'polyturn[vision]'") from problem
    Image.init()
    try:
        image = Image.open(io.BytesIO(data), formats=[f for f in FORMATS if f in Image.OPEN])  # reads only the header
        check_size(image.size, what=what)
        num_scans = data.count(b"\xff\xda") if image.format in ("JPEG", "MPO") else 0
        if num_scans > MAX_SCANS:
            raise DataError(
                f"{what} is a JPEG file of {num_scans} scans; at most {MAX_SCANS} are decoded, so write it again"
            )
        return image.convert("RGB")
    except DataError:
        raise
    except Exception as problem:  # decoders raise all kinds of errors for damaged files
        raise DataError(f"{what} is not an image that Pillow reads ({one_line(problem)})") from problem


def _load_frames(sources: Sequence[str]) -> list[Any]:
    """Load the frames of a video, up to `MAX_FRAME_PIXELS` in all."""
    frames, left = [], MAX_FRAME_PIXELS
    for source in sources:
        frames.append(load_image(source))
        left -= frames[-1].width * frames[-1].height
        if left < 0:
            raise DataError(
                f"the {len(sources)} frames of a video have more than {MAX_FRAME_PIXELS} pixels; show fewer, or smaller ones"
            )
    return frames


def check_size(size: tuple[int, int], *, what: str) -> None:
    """Check the size in an image's header before decoding: a file of kilobytes may decode to gigabytes.

    Raises:
        DataError: the image has more than `MAX_PIXELS` pixels.
    """
    width, height = size
    if width * height > MAX_PIXELS:
        raise DataError(f"{what} has {width} x {height} pixels; at most {MAX_PIXELS} are decoded, so show a smaller one")


def load_samples(source: str) -> tuple[NDArray[np.float32], int | None]:
    """Load a sound as mono samples [T] in float32, and their rate in Hz, None if unknown.

    Raises:
        DataError: the source is neither an array nor a WAV file of 8, 16 or 32 bits.
    """
    data = read_source(source)
    if data.startswith(b"\x93NUMPY"):
        try:
            return as_samples(np.load(io.BytesIO(data), allow_pickle=False)), None
        except (ValueError, TypeError, EOFError, MemoryError) as problem:  # the header may claim any length
            raise DataError(f"{show(source)} is not an array of samples ({one_line(problem)})") from problem
    try:
        with wave.open(io.BytesIO(data)) as sound:
            width, rate, channels = sound.getsampwidth(), sound.getframerate(), sound.getnchannels()
            raw = sound.readframes(sound.getnframes())
    except (wave.Error, EOFError) as problem:
        raise DataError(f"{show(source)} is not a WAV file ({one_line(problem)}); convert it, or give samples") from problem
    if width not in (1, 2, 4):
        raise DataError(f"{show(source)} has samples of {8 * width} bits; convert it to 16")
    samples = as_samples(np.frombuffer(raw, {1: "<u1", 2: "<i2", 4: "<i4"}[width]))
    return samples.reshape(-1, channels).mean(axis=1).astype(np.float32), rate


def load_processor(path: str, *, revision: str | None = None) -> Any:
    """Load the processor at `path` (a folder, or a name on the hub).

    Raises:
        ConfigError: there is no processor at `path`, or a library that it needs is not installed.
    """
    from transformers import AutoProcessor

    cached = only_cached(path, revision=revision)
    try:
        return AutoProcessor.from_pretrained(path, revision=revision, local_files_only=cached, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except ImportError as problem:
        raise ConfigError(
            f"the processor at {path!r} needs a library that is not installed ({one_line(problem)[:300]}); install it "
            "(pip install 'polyturn[vision]', and torchvision for videos), or name a function that builds a processor "
            "without that part in model.processor"
        ) from problem
    except Exception as problem:
        raise ConfigError(f"no processor can be loaded from {path!r} ({one_line(problem)[:300]})") from problem


def _find(ids: Ids, wanted: Ids, start: int) -> int | None:
    """Return the position of `wanted` in `ids` from `start` on; None if it does not occur."""
    for at in (start + np.flatnonzero(ids[start:] == wanted[0])).tolist():
        if np.array_equal(ids[at : at + len(wanted)], wanted):
            return int(at)
    return None


def _attribute(owner: Any, name: str) -> Any:
    """Return the attribute `name` of a processor; None if it does not exist. Processors differ in their attributes, and no
    class declares them."""
    try:
        return owner.__getattribute__(name)
    except AttributeError:
        return None
