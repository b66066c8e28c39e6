"""Converts a client's request to a task. A client is not trusted, so a request is checked more strictly than a data file.

    {"messages": […], "images": ["data:image/png;base64,…"], "data_dict": {"solution": "4"}, "uuid": "a"}  ->  Task(id="a")

A request must contain its media, so that it cannot read this machine's files. It may name registered parts only, so that it
cannot make the server import a module.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from polyturn.core.errors import DataError, did_you_mean
from polyturn.core.media import KINDS, kind_of, show, to_source
from polyturn.core.task import Task
from polyturn.data.media import COLUMNS
from polyturn.data.rows import task_from_row

REQUEST_KEYS = (
    "messages", "images", "audios", "videos", "tools", "objects", "chat_template_kwargs", "data_dict", "uuid", "add_eos"
)  # fmt: skip
_NOT_READ = {
    "objects": "this server does not read boxes and points; write them into the messages",
    "chat_template_kwargs": "the server's configuration sets them (model.template_kwargs)",
    "add_eos": "this server does not score texts",
}
"""Keys that a request may have only with an empty value, and why."""
_BEGINNINGS = {
    "image": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*"),
    "audio": (b"RIFF", b"ID3", b"\xff\xfb", b"\xff\xf3", b"OggS", b"fLaC"),
    "video": (b"\0\0\0", b"RIFF", b"\x1aE\xdf\xa3", b"GIF8"),
}
"""Kind of media -> the first bytes of its file formats."""
_ENVIRONMENTS = ("env", "env_config")
"""Columns that name an environment."""


def task_of(request: Any, *, id: str, max_context: int | None = None) -> Task:
    """Return the task that a request describes.

    Args:
        request: The request as parsed JSON.
        id: The id of the task.
        max_context: Length of the context in tokens. A request with more messages cannot fit it, and is refused unread.

    Raises:
        DataError: the request is malformed, refers to a file or an address, or names something unregistered.
    """
    if not isinstance(request, Mapping):
        raise DataError(f"a request must be an object with `messages`, not {request!r:.100}")
    for key in request:
        if key not in REQUEST_KEYS:
            raise DataError(
                f"a request cannot have {key!r}.{did_you_mean(key, REQUEST_KEYS)} A row's other columns go into data_dict"
            )
    messages, columns = request.get("messages"), request.get("data_dict") or {}
    if not isinstance(messages, list) or not messages:
        raise DataError(f"`messages` must be a non-empty list of messages, not {messages!r:.100}")
    if max_context is not None and len(messages) > max_context:
        raise DataError(f"the request has {len(messages)} messages, more than fit a context of {max_context} tokens")
    if not isinstance(columns, Mapping):
        raise DataError(f"data_dict is {columns!r:.100}, not an object with the row's other columns")
    for key, why in _NOT_READ.items():
        if request.get(key):
            raise DataError(f"the request's {key} is {request[key]!r:.100}, but {why}")
    media = {key: _marked(request[key], kind) for key, kind in COLUMNS.items() if request.get(key)}
    if request.get("tools"):
        media["tools"] = request["tools"]
    messages = [_marked_parts(message) for message in messages]
    task = task_from_row({**columns, **media, "messages": messages}, index=0, split="serve", source="the request")
    for message in task.prompt:
        for medium in message.media:
            sources = (medium.source,) if isinstance(medium.source, str) else medium.source
            for source in sources:
                _check_whole(medium.kind, source)
    for kwargs in task.tools_kwargs.values():
        for row in (kwargs.create_kwargs, kwargs.execute_kwargs, kwargs.calc_reward_kwargs, kwargs.release_kwargs):
            _check_media_of(row)
    for key in _ENVIRONMENTS:
        value = task.extra.get(key)
        _check_registered(key, value.get("name") if isinstance(value, Mapping) else value)
    return dataclasses.replace(task, id=id)


def _marked(value: Any, kind: str) -> Any:
    """Convert bare base64, which some trainers send, to data URIs; return all other media unchanged."""
    if isinstance(value, list):
        return [_marked(one, kind) for one in value]
    if isinstance(value, Mapping):
        inner = value.get("bytes", value.get("url"))
        return value if (marked := _marked(inner, kind)) is inner else marked
    if isinstance(value, str) and not value.startswith(("data:", "http:", "https:", "file:")):
        try:
            content = base64.b64decode("".join(value.split()), validate=True)
        except ValueError:
            return value
        return to_source(kind, content) if content.startswith(_BEGINNINGS[kind]) else value
    return value


def _marked_parts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = [
        {**part, **{key: _marked(part[key], kind) for key in (kind, f"{kind}_url") if key in part}}
        if isinstance(part, Mapping) and (kind := kind_of(part)) is not None
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _check_whole(kind: str, source: str) -> None:
    if not source.startswith("data:"):
        raise DataError(
            f"the request refers to the {kind} {show(source)}; send media whole, as data URIs (data:image/png;base64,…): "
            "the server does not open files for a request"
        )


def _check_media_of(value: Any, *, kind: str | None = None) -> None:
    """Refuse tool kwargs with an image, a video or a sound that is a file or an address."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = str(key).removesuffix("_url").removesuffix("s")
            _check_media_of(inner, kind=name if name in KINDS else None if key == "bytes" else kind)
    elif isinstance(value, list):
        for inner in value:
            _check_media_of(inner, kind=kind)
    elif kind is not None and isinstance(value, str):
        _check_whole(kind, value)


def _check_registered(key: str, name: Any) -> None:
    if isinstance(name, str) and any(sign in name for sign in ":./\\"):
        raise DataError(
            f"the request's {key} names {show(name)}; use a registered name (`envs.register` in a plug-in): the server "
            "does not import modules for a request"
        )
