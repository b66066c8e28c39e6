"""Media: an image, a video or a sound as a value that can be compared, pickled and written as JSON.

    {"type": "image", "image": <PIL image>}                          ->  {"type": "image", "image": "data:image/png;…"}
    {"type": "image_url", "image_url": {"url": "data:image/png;…"}}  ->  {"type": "image", "image": "data:image/png;…"}
    {"type": "video", "video": [<frame>, <frame>]}                   ->  {"type": "video", "video": ("data:…", "data:…")}

Rows, tools, interactions and schedulers pass media in many forms. All of them become a *source*: a data URI, the path of a
file, or a tuple of these (the frames of a video). No record holds pixels; the processor of the model reads them from the
source.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.errors import DataError, one_line

KINDS = ("image", "video", "audio")
"""The kinds of message parts other than text."""

Source = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One image, video or sound, as a message shows it."""

    kind: str
    """One of `KINDS`."""
    source: Source
    """A data URI, the path of a file, or a tuple of these (the frames of a video)."""


def kind_of(part: Mapping[str, Any]) -> str | None:
    """Return the kind of a message part, one of `KINDS`; None for text and for unknown types."""
    name = str(part.get("type", "")).removesuffix("_url")
    if name in KINDS:
        return name
    return next((kind for kind in KINDS if kind in part), None) if not name else None


def normal_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message part with its medium as a source; a part without a medium is returned unchanged.

    Raises:
        DataError: the part has the type of a medium but no readable source.
    """
    kind = kind_of(part)
    if kind is None:
        return part
    value = part.get(kind, part.get(f"{kind}_url"))
    source = to_source(kind, value)
    if part.get("type") == kind and value is source:
        return part
    rest = {k: v for k, v in part.items() if k not in ("type", kind, f"{kind}_url")}
    return {"type": kind, kind: source, **rest}


def media_of(content: str | Sequence[Mapping[str, Any]]) -> tuple[Media, ...]:
    """Return the media of a message's content, in order."""
    if isinstance(content, str):
        return ()
    parts = ((kind_of(part), part) for part in content)
    return tuple(Media(kind=kind, source=to_source(kind, part.get(kind))) for kind, part in parts if kind is not None)


def to_source(kind: str, value: Any, *, base: Path | None = None) -> Source:
    """Convert a medium of a row, a tool or a plug-in to a source, the form that records keep.

    Args:
        kind: One of `KINDS`.
        value: A source; bytes of a file; a mapping with "bytes", "path" or "url", as datasets have them; a Pillow image;
            an array of an image [H, W, 3] from 0 to 255, or of a mono sound [T]; for a video, a list or an array of frames.
        base: The folder that relative paths start from; None keeps them relative.

    Raises:
        DataError: `value` has another form, or is a URL that would have to be downloaded.
    """
    if isinstance(value, str):
        return _checked(kind, value, base)
    if isinstance(value, Mapping):
        # Data sets write all of these keys, most of them null.
        source = next((value[k] for k in ("bytes", "path", "url", kind, f"{kind}_url") if value.get(k) is not None), None)
        if source is None:
            raise DataError(
                f"{a_kind(kind)} given as an object needs 'bytes', 'path' or 'url'; this one has {sorted(value)}"
            )
        return to_source(kind, source, base=base)
    if isinstance(value, bytes | bytearray):
        return _uri(kind, bytes(value))
    if kind == "video" and (isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 4)):
        if isinstance(value, tuple) and value and all(isinstance(v, str) and base is None for v in value):
            return cast(tuple[str, ...], value)
        frames = tuple(to_source("image", frame, base=base) for frame in value)
        if not frames:
            raise DataError("a video given as a list needs at least one frame")
        return cast(tuple[str, ...], frames)
    if kind != "video" and isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple | int | float):
        try:
            value = np.array(value)  # dataset files store an array as nested lists
        except (ValueError, OverflowError) as problem:
            raise DataError(f"{a_kind(kind)} given as lists is not an array ({one_line(problem):.200})") from problem
    if isinstance(value, np.ndarray) and value.dtype.kind in "uif":
        return _array(kind, value)
    if kind == "image" and type(value).__module__.partition(".")[0] == "PIL":
        return _png(np.asarray(value.convert("RGB")))
    raise DataError(
        f"{a_kind(kind)} cannot be read from {show(value)}; give a path, bytes, a data URI"
        + {"image": " or a Pillow image", "video": " or a list of frames", "audio": " or an array of samples"}[kind]
    )


def read_source(source: str) -> bytes:
    """Return the bytes of the file or data URI `source`.

    Raises:
        DataError: there is no such file, or the data URI is damaged.
    """
    if source.startswith("data:"):
        head, _, data = source.partition(",")
        try:
            return base64.b64decode(data, validate=True) if head.endswith(";base64") else data.encode()
        except ValueError as problem:
            raise DataError(f"the data URI {source[:40]!r}… is damaged ({one_line(problem)})") from problem
    try:
        return Path(source).read_bytes()
    except OSError as problem:
        raise DataError(f"the file {source!r} cannot be read ({one_line(problem)})") from problem


def _checked(kind: str, value: str, base: Path | None) -> str:
    if value.startswith(("http://", "https://")):
        raise DataError(
            f"{a_kind(kind)} is the URL {value[:120]!r}; nothing is downloaded during a run, so give a file's path"
        )
    if value.startswith("data:"):
        return value
    path = value.removeprefix("file://")
    return path if base is None or path.startswith("/") else str(base / path)


_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}


def _uri(kind: str, data: bytes) -> str:
    return f"data:{_TYPES[kind]};base64,{base64.b64encode(data).decode()}"


def _array(kind: str, value: np.ndarray[Any, Any]) -> str:
    if kind == "image" and value.ndim in (2, 3):
        return _png(value)
    if kind == "audio" and value.ndim == 1:
        out = io.BytesIO()
        np.save(out, as_samples(value), allow_pickle=False)
        return f"data:application/x-npy;base64,{base64.b64encode(out.getvalue()).decode()}"
    wanted = {"image": "[height, width, 3]", "video": "[frames, height, width, 3]", "audio": "[samples]"}[kind]
    raise DataError(f"{a_kind(kind)} given as an array must have the shape {wanted}, not {list(value.shape)}")


def as_samples(value: np.ndarray[Any, Any]) -> Floats:
    """Return sound samples in float32; integers of 8 to 32 bits are scaled to [-1, 1] by the range of their type.

    Raises:
        DataError: the samples are 64-bit integers beyond [-1, 1], whose range is unknown.
    """
    bits = 8 * value.dtype.itemsize
    if value.dtype.kind not in "ui" or (bits == 64 and (not value.size or (value.min() >= -1 and value.max() <= 1))):
        return value.astype(np.float32)
    if bits == 64:
        raise DataError(
            f"a sound has 64-bit integers from {value.min()} to {value.max()}, whose full volume is unknown; give floats "
            "from -1 to 1, or an array of int16"
        )
    half = 2.0 ** (bits - 1)
    scaled: Floats = ((value.astype(np.float64) - (half if value.dtype.kind == "u" else 0.0)) / half).astype(np.float32)
    return scaled


def _png(pixels: np.ndarray[Any, Any]) -> str:
    """Encode an image, [height, width, 3] or [height, width] of values from 0 to 255, as a PNG data URI."""
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    height, width, channels = pixels.shape
    if channels != 3:
        raise DataError(f"an image given as an array must have the shape [height, width, 3], not {list(pixels.shape)}")
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.size else (0.0, 0.0)
    if not 0 <= low <= high <= 255 or (pixels.dtype.kind == "f" and 0 < high <= 1):
        raise DataError(f"an image given as an array must have values from 0 to 255, not {low:g} to {high:g}; scale them")
    # PNG puts the number of a filter before each line of pixels; 0 means none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.astype(np.uint8).reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    framed = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks]
    return _uri("image", b"\x89PNG\r\n\x1a\n" + b"".join(framed))


def a_kind(kind: str) -> str:
    """Return the name of a kind with its article."""
    return f"an {kind}" if kind != "video" else "a video"


def show(value: Any) -> str:
    """Return a value as a short text for a message."""
    text = repr(value)
    return f"{text[:57]}… ({type(value).__name__})" if len(text) > 60 else f"{text} ({type(value).__name__})"
