"""Shipped tools: answers to GSM8K and geometry, which cost 0.05 without progress, and regions of the task's image."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyturn.core.errors import DataError
from polyturn.tools.geo3k import Geo3kTool
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.tools.zoom import Box, ImageZoomInTool, fit_box
from support.refusals import refuses_later


@pytest.mark.parametrize(
    ("tool", "truth", "answers", "rewards", "final"),
    [
        (Gsm8kTool, "72", ["70", "72", "72", 72, "#### 72", "1"], [-0.05, 0.0, -0.05, -0.05, -0.05, -0.05], 0.0),
        (Gsm8kTool, "72", ["72"], [0.0], 1.0),
        (Gsm8kTool, "72", [None], [-0.05], 0.0),
        (Geo3kTool, "1/2", ["3", "0.5", "0.5"], [-0.05, 0.0, -0.05], 1.0),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
async def test_progress_is_free_and_repeating_costs(
    tool: Any, truth: str, answers: list[Any], rewards: list[float], final: float, is_nested: bool
) -> None:
    if tool is Geo3kTool:
        pytest.importorskip("math_verify")
    made, row = tool({}), {"ground_truth": truth}
    instance_id, response = await made.create("e", **({"create_kwargs": row} if is_nested else row))
    assert (instance_id, response.is_empty()) == ("e", True)
    asked = [{} if answer is None else {"answer": answer} for answer in answers]
    assert [(await made.execute("e", parameters))[1] for parameters in asked] == rewards
    assert await made.calc_reward("e") == final
    await made.release("e")
    with pytest.raises(KeyError):
        await made.release("e")


async def test_model_reads_how_its_answer_was_parsed() -> None:
    tool = Gsm8kTool({})
    await tool.create("e", ground_truth="72")
    assert (await tool.execute("e", {"answer": "#### 72"}))[0].text == "Current parsed answer='#### 72' reward=1.0"


async def test_episodes_do_not_share_state() -> None:
    tool = Gsm8kTool({})
    await tool.create("a", ground_truth="1")
    await tool.create("b", ground_truth="2")
    assert (await tool.execute("a", {"answer": "1"}))[1] == 0.0
    assert (await tool.execute("b", {"answer": "1"}))[1] == -0.05


def photo() -> Image.Image:
    image = Image.new("RGB", (200, 100), "white")
    image.paste("red", (100, 0, 200, 100))
    return image


def source(kind: str, folder: Path) -> Any:
    """Return the photo in one of the forms that a row may have it in."""
    buffer = io.BytesIO()
    photo().save(buffer, "PNG")
    (folder / "photo.png").write_bytes(buffer.getvalue())
    return {
        "image": photo(),
        "path": str(folder / "photo.png"),
        "file": f"file://{folder / 'photo.png'}",
        "data": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(),
        "bytes": buffer.getvalue(),
        "row": {"bytes": buffer.getvalue(), "path": None},
    }[kind]


@pytest.mark.parametrize("kind", ["image", "path", "file", "data", "bytes", "row"])
async def test_region_comes_back_as_an_image(kind: str, tmp_path: Path) -> None:
    tool, row = ImageZoomInTool({}), {"image": source(kind, tmp_path)}
    instance_id, _ = await tool.create("e", **({"create_kwargs": row} if kind == "image" else row))
    response, reward, metrics = await tool.execute(instance_id, {"bbox_2d": [110, 10, 150, 60], "label": "door"})
    assert (reward, metrics) == (0.0, {"success": True})
    assert response.text == "Zoomed in on the image to the region [110, 10, 150, 60] with label door."
    (crop,) = response.image
    assert crop.size == (40, 50)
    assert crop.getpixel((0, 0)) == (255, 0, 0)
    await tool.release(instance_id)


@pytest.mark.parametrize(
    ("given", "box"),
    [
        ([-10, -10, 300, 300], Box(0, 0, 200, 100)),
        ([100, 50, 110, 60], Box(91, 41, 119, 69)),
        ([0, 0, 5, 50], Box(0, 0, 28, 50)),
        ([195, 0, 200, 50], Box(172, 0, 200, 50)),
        ([10.4, 10.6, 50.5, 60.5], Box(10, 10, 51, 61)),
    ],
)
def test_boxes_are_clipped_and_widened(given: list[float], box: Box) -> None:
    assert fit_box(given, width=200, height=100) == box


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (None, "a list of 4 numbers"),
        ([1, 2, 3], "a list of 4 numbers"),
        ([1, 2, 3, "x"], "4 numbers"),
        ([1, 2, 3, float("inf")], "4 numbers"),
        ([50, 10, 50, 60], "empty"),
        ([250, 0, 300, 50], "200 x 100"),
        ([10**400, 0, 300, 50], "200 x 100"),
        ([0, 0, 200, 1], "100 times"),
    ],
)
async def test_box_that_cannot_be_cut_costs_a_little(given: Any, problem: str) -> None:
    tool = ImageZoomInTool({})
    await tool.create("e", image=photo())
    response, reward, metrics = await tool.execute("e", {"bbox_2d": given})
    assert response.image is None
    assert problem in response.text
    assert (reward, metrics) == (-0.05, {"success": False})


@pytest.mark.parametrize("source", [None, "no/such/file.png", "data:image/png;base64,????", b"no image", 5])
async def test_image_that_cannot_be_read_is_a_data_error(source: Any) -> None:
    tool = ImageZoomInTool({})
    await refuses_later(lambda: tool.create("e", image=source), DataError, "image")
    with pytest.raises(KeyError):
        await tool.release("e")
