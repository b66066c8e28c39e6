"""ImageZoomInTool: lets the model select a region of the task's image, and returns the region as a new image.

    create(image="photo.png")                  a PIL image, a path, a data URI, or an http(s) URL
    execute({"bbox_2d": [10, 20, 200, 120]})   left, top, right, bottom in pixels of the original

A box is clipped to the image. A side under 28 pixels is widened, because vision encoders use patches of that size. An empty
box, or a box more than a hundred times as long as wide, is refused, which costs 0.05.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import uuid4

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.infra.http import JsonClient
from polyturn.infra.settings import AtLeastOne, Seconds
from polyturn.infra.threads import DaemonThreads
from polyturn.tokens.multimodal import decode_image
from polyturn.tools.base import BaseTool
from polyturn.tools.http_service import WorkerSettings
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 28
"""Shortest side of a crop, in pixels."""
MAX_ASPECT = 100
"""Maximum ratio of a box's longer side to its shorter side."""
REFUSED_REWARD = -0.05


class ZoomSettings(WorkerSettings):
    """The number of images that are processed at once, and the time to fetch one."""

    num_workers: AtLeastOne = 20
    rate_limit: AtLeastOne = 50
    timeout: Seconds = 30.0
    """Seconds for fetching an image."""


class ImageZoomInTool(BaseTool):
    """Crops the task's image. Config: `ZoomSettings`; a subclass may read further keys."""

    checks_own_arguments = True
    stateless = True
    """True, because the image comes from the task, and calls do not change it."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        settings = ZoomSettings.read(config, who="the zoom tool", ignores_others=type(self) is not ImageZoomInTool)
        self.timeout = settings.timeout
        self._threads = DaemonThreads(name="zoom", max_threads=settings.max_concurrent)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the default schema, for a tool file without one."""
        bbox = {
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": "The region as [left, top, right, bottom], in pixels of the original image.",
        }
        label = {"type": "string", "description": "What is in the region."}
        return OpenAIFunctionToolSchema.of(
            "image_zoom_in_tool",
            "Look at one region of the image more closely.",
            {"bbox_2d": bbox, "label": label},
            required=["bbox_2d"],
        )

    async def create(self, instance_id: str | None = None, image: Any = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an instance for one episode with its image: the argument `image`, or `create_kwargs["image"]`.

        Raises:
            DataError: the image is missing or cannot be read.
        """
        instance_id = str(uuid4()) if instance_id is None else instance_id
        source = kwargs.get("create_kwargs", {}).get("image") if image is None else image
        if source is None:
            raise DataError("Missing required 'image' parameter in kwargs: put it into the row's create_kwargs of this tool")
        image_source = await read_image(source, timeout_s=self.timeout, threads=self._threads)
        self._instance_dict[instance_id] = {"image": image_source, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the region `bbox_2d` as an image."""
        image: Image = self._instance_dict[instance_id]["image"]
        box = fit_box(parameters.get("bbox_2d"), width=image.width, height=image.height)
        if isinstance(box, str):
            return ToolResponse(text=f"Error: {box}"), REFUSED_REWARD, {"success": False}
        crop = await self._threads.run(image.crop, tuple(box))
        label = parameters.get("label")
        message = f"Zoomed in on the image to the region {list(box)}" + (f" with label {label}." if label else ".")
        return ToolResponse(image=[crop], text=message), 0.0, {"success": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the episode's image; raise KeyError for an id that was never created."""
        del self._instance_dict[instance_id]


class Box(NamedTuple):
    """A region of an image, in pixels."""

    left: int
    top: int
    right: int
    bottom: int


def fit_box(value: Any, *, width: int, height: int) -> Box | str:
    """Return the region to crop, inside the image and at least `MIN_SIDE` wide and high, or an error message."""
    if not isinstance(value, list | tuple) or len(value) != 4:
        return "'bbox_2d' must be a list of 4 numbers: [left, top, right, bottom]."
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < math.inf for v in value):
        return f"'bbox_2d' must hold 4 numbers, not {list(value)!r:.100}."
    left, top = max(0.0, value[0]), max(0.0, value[1])
    right, bottom = min(float(width), value[2]), min(float(height), value[3])
    if left >= right or top >= bottom:
        return f"'bbox_2d' {list(value)} is empty or lies outside of the image, which is {width} x {height}."
    longer, shorter = max(right - left, bottom - top), min(right - left, bottom - top)
    if longer / shorter > MAX_ASPECT:
        return f"'bbox_2d' {list(value)} is more than {MAX_ASPECT} times as long as wide."
    left, right = _widen(left, right, limit=width)
    top, bottom = _widen(top, bottom, limit=height)
    if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
        return f"the image is {width} x {height}; a region of {MIN_SIDE} x {MIN_SIDE} does not fit into it."
    return Box(math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom))


def _widen(low: float, high: float, *, limit: int) -> tuple[float, float]:
    """Widen [low, high] to at least `MIN_SIDE` around its middle, moved to stay within the image."""
    if high - low >= MIN_SIDE:
        return low, high
    start = math.floor((low + high) / 2 - MIN_SIDE / 2)
    start = max(0, min(start, limit - MIN_SIDE))
    return start, min(limit, start + MIN_SIDE)


async def read_image(source: Any, *, timeout_s: float, threads: DaemonThreads) -> Image:
    """Read an image in RGB.

    Args:
        source: A PIL image, its bytes, a path, a data URI, an http(s) URL, or a mapping with one of these under "bytes",
            "path", "url" or "image".
        timeout_s: Deadline of fetching a URL, in seconds.
        threads: The threads that read files and decode images.

    Raises:
        DataError: the image cannot be read.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as problem:
        raise ConfigError("the zoom tool needs Pillow: pip install 'polyturn[vision]'") from problem
    if isinstance(source, Mapping):
        value = next((source[k] for k in ("bytes", "image", "path", "url") if source.get(k) is not None), None)
        return await read_image(value, timeout_s=timeout_s, threads=threads)
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    try:
        if isinstance(source, bytes):
            data = source
        elif isinstance(source, str) and source.startswith("data:"):
            data = base64.b64decode(source.partition(",")[2], validate=True)
        elif isinstance(source, str) and source.startswith(("http://", "https://")):
            client = JsonClient(timeout_s=timeout_s)
            try:
                reply = await client.send("GET", source)
            finally:
                await client.close()
            if 300 <= reply.status < 400:
                raise DataError(f"the image {source!r:.100} redirects; redirects are not followed, so give the final URL")
            if reply.status != 200:
                raise DataError(f"the image {source!r:.100} cannot be read: its server answers {reply.status}")
            data = reply.content
        elif isinstance(source, str | Path):
            data = await threads.run(Path(str(source).removeprefix("file://")).read_bytes)
        else:
            raise DataError(f"an image is {source!r:.100}; give a path, a URL, a data URI, bytes or a PIL image")

        return cast("Image.Image", await threads.run(decode_image, data, what=f"the image {source!r:.100}"))
    except (OSError, ValueError, TimeoutError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"the image {source!r:.100} cannot be read: {one_line(problem)}") from problem
