"""Converts an MCP server's answer to text and images for the model; a sentence replaces unsupported content.

[text "It is", image/png …, audio/wav …]  ->  "It is\n(audio/wav of 20 kB, which cannot be shown)" and the image
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def text_of(content: Sequence[Any], structured: Any = None) -> str:
    """Return the text of an answer's content blocks.

    Args:
        content: The SDK's content blocks.
        structured: The answer's structured content. It is used only if there are no blocks, because servers repeat it in a
            text block.
    """
    if not content and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    texts = [text for block in content if (text := _text(block)) is not None]
    return (" " if all(block.type == "text" for block in content) else "\n").join(texts)


def images_of(content: Sequence[Any]) -> list[str]:
    """Return the images among content blocks, as data URLs."""
    images = []
    for block in content:
        if block.type == "image":
            images.append(f"data:{block.mime_type};base64,{block.data}")
        elif block.type == "resource" and _is_image(block.resource):
            images.append(f"data:{block.resource.mime_type};base64,{block.resource.blob}")
    return images


def blocks_of(text: str, images: Sequence[str]) -> list[Any]:
    """Convert text and images (data URLs) to content blocks."""
    from mcp import types

    blocks: list[Any] = []
    for image in images:
        head, _, data = image.partition(",")
        blocks.append(types.ImageContent(type="image", data=data, mime_type=head[len("data:") :].partition(";")[0]))
    if text or not blocks:
        blocks.append(types.TextContent(type="text", text=text))
    return blocks


def _text(block: Any) -> str | None:
    if block.type == "text":
        return str(block.text)
    if block.type == "audio":
        return f"({_size(block.mime_type, block.data)}, which cannot be shown)"
    if block.type == "resource_link":
        about = ", ".join(str(v) for v in (block.mime_type, block.description) if v)
        return f"{block.title or block.name}: {block.uri}{f' ({about})' if about else ''}"
    if block.type == "resource" and not _is_image(block.resource):
        return _resource(block.resource)
    return None  # an image


def _resource(resource: Any) -> str:
    from mcp.types import TextResourceContents

    if isinstance(resource, TextResourceContents):
        return f"{resource.uri}:\n{resource.text}"
    return f"({resource.uri}: {_size(resource.mime_type or 'a file', resource.blob)}, which cannot be shown)"


def _is_image(resource: Any) -> bool:
    from mcp.types import BlobResourceContents

    return isinstance(resource, BlobResourceContents) and (resource.mime_type or "").startswith("image/")


def _size(kind: str, base64: str) -> str:
    num_bytes = len(base64) * 3 // 4
    return f"{kind} of {num_bytes} bytes" if num_bytes < 1000 else f"{kind} of {num_bytes / 1000:.0f} kB"
