"""A request is only data: it opens no file, fetches no address and imports nothing."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from polyturn.core.errors import DataError
from polyturn.serving.requests import task_of

SAID = [{"role": "user", "content": "What is this?"}]
WHOLE = "data:image/png;base64,iVBORw0KGgo="


def zoom(image: Any) -> dict[str, Any]:
    kwargs = {"image_zoom_in_tool": {"create_kwargs": {"image": image}}}
    return {"prompt": SAID, "extra_info": {"tools_kwargs": kwargs}}


def test_embedded_image_is_accepted():
    task = task_of({"messages": SAID, "images": [WHOLE], "data_dict": {"env_config": {"name": "lake"}}}, id="a")
    assert task.id == "a" and task.prompt[0].media[0].source == WHOLE
    task = task_of({"messages": SAID, "data_dict": zoom(WHOLE) | zoom({"bytes": "iVBO"})}, id="a")
    assert task.prompt[0].text == "What is this?"


def test_image_in_bare_base64_is_accepted():
    bare = WHOLE.partition(",")[2]
    parts = [{"type": "image", "image": bare}]
    others = [[{"type": "image_url", "image_url": url}] for url in (bare, {"url": bare})]
    said = [{"messages": [{"role": "user", "content": content}]} for content in (parts, *others)]
    shown = (bare, {"bytes": bare}, {"url": bare}, f"{bare[:8]}\n{bare[8:]}\n")
    for request in (*said, *({"messages": SAID, "images": [image]} for image in shown)):
        assert task_of(request, id="a").prompt[0].media[0].source == WHOLE
    gif = base64.b64encode(b"GIF89a....").decode()
    assert task_of({"messages": SAID, "images": gif}, id="a").prompt[0].media[0].source.endswith(gif)
    for place in ("abcd", "etc/passwd+x", base64.b64encode(b"no image").decode()):
        with pytest.raises(DataError, match="does not open files"):
            task_of({"messages": SAID, "images": [place]}, id="a")


@pytest.mark.parametrize("place", ["/etc/passwd", "../x.png", "file:///etc/passwd", "http://169.254.169.254/", "C:\\x.png"])
def test_file_or_address_is_refused_in_every_field(place: str):
    parts = [{"type": "image", "image": place}]
    for request in (
        {"messages": SAID, "images": [place]},
        {"messages": SAID, "videos": [[WHOLE, place]]},
        {"messages": SAID, "images": [{"path": place}]},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": place}}]}]},
        {"messages": SAID, "data_dict": zoom(place)},
        {"messages": SAID, "data_dict": zoom({"url": place})},
        {"messages": SAID, "data_dict": zoom([WHOLE, {"image_url": place}])},
    ):
        with pytest.raises(DataError, match=r"does not open files|nothing is downloaded"):
            task_of(request, id="a")


@pytest.mark.parametrize("name", ["subprocess:Popen", "os.system", "evil.py:Env", "/tmp/evil.py:E", "gymnasium:evil:E-v0"])
def test_name_that_would_be_imported_is_refused(name: str):
    for columns in ({"env_config": {"name": name}}, {"env": name}, {"env": {"name": name, "seed": 1}}):
        with pytest.raises(DataError, match="does not import modules"):
            task_of({"messages": SAID, "data_dict": columns}, id="a")


def test_more_messages_than_a_context_holds_are_not_read():
    with pytest.raises(DataError, match="the request has 600 messages, more than fit a context of 512 tokens"):
        task_of({"messages": [object()] * 600}, id="a", max_context=512)
