"""Images, videos and sounds in rows: columns beside the prompt, where the prompt points at them, as datasets write it."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from polyturn.core.errors import DataError
from polyturn.core.media import to_source
from polyturn.core.messages import Message
from polyturn.data.dataset import TaskDataset
from polyturn.data.rows import task_from_row
from polyturn.tokens.multimodal import load_image, load_samples


def picture(color: str) -> Image.Image:
    return Image.new("RGB", (4, 3), color)


def png(color: str) -> bytes:
    out = io.BytesIO()
    picture(color).save(out, format="PNG")
    return out.getvalue()


def prompt_of(row: dict[str, Any], source: str = "data/tasks.jsonl") -> list[tuple[str, Any]]:
    """Return the parts of a row's first message, as (type, text or source)."""
    content = task_from_row(row, index=0, split="train", source=source).prompt[0].content
    assert not isinstance(content, str)
    return [(str(part["type"]), part[str(part["type"])]) for part in content]


def test_images_take_the_places_of_their_pointers() -> None:
    row = {
        "prompt": [{"role": "user", "content": "<image>\nand <image>, which is red?"}],
        "images": [picture("red"), picture("blue")],
    }
    red, blue = to_source("image", picture("red")), to_source("image", picture("blue"))
    assert prompt_of(row) == [("image", red), ("text", "\nand "), ("image", blue), ("text", ", which is red?")]


def test_images_and_videos_are_counted_apart() -> None:
    row = {"prompt": "<video> or <image>?", "images": ["a.png"], "videos": ["b.mp4"]}
    assert prompt_of(row) == [("video", "data/b.mp4"), ("text", " or "), ("image", "data/a.png"), ("text", "?")]


def test_images_without_pointers_come_first() -> None:
    row = {"prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}], "images": ["a.png"]}
    task = task_from_row(row, index=0, split="train", source="data/x.jsonl")
    assert task.prompt[0] == Message(role="system", content="Look.")
    assert [part["type"] for part in task.prompt[1].content] == ["image", "text"]


def test_parts_without_a_source_take_the_next_item() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    row = {"prompt": [{"role": "user", "content": content}], "images": ["a.png", "b.png"]}
    assert prompt_of(row) == [("image", "data/a.png"), ("text", "or"), ("image", "data/b.png")]


def test_pointer_without_a_column_is_text() -> None:
    task = task_from_row({"prompt": "Write <image> in HTML."}, index=0, split="train", source="x.jsonl")
    assert task.prompt[0].content == "Write <image> in HTML."


@pytest.mark.parametrize(
    "value",
    [
        {"bytes": png("red")},
        {"bytes": png("red"), "path": None},
        {"image": picture("red")},
        picture("red"),
        np.array(picture("red")),
    ],
)
def test_image_may_have_any_usual_form(value: Any) -> None:
    ((kind, source), _) = prompt_of({"prompt": "<image>?", "images": [value]})
    assert kind == "image"
    assert np.array_equal(np.array(load_image(source)), np.array(picture("red")))


def test_openai_parts_hold_data_uris() -> None:
    uri = str(to_source("image", picture("red")))
    row = {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]}
    assert prompt_of(row) == [("image", uri)]


def test_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    picture("red").save(tmp_path / "red.png")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "<image>?", "images": "red.png"}))
    (task,) = TaskDataset.open(tmp_path / "tasks.jsonl", split="train")
    assert load_image(task.prompt[0].media[0].source).size == (4, 3)  # type: ignore[arg-type]


def test_bytes_come_back_from_parquet(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "<image>?"}], "images": [{"bytes": png("blue"), "path": None}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (task,) = TaskDataset.open(tmp_path / "t.parquet", split="train")
    assert "images" not in task.extra
    assert np.array_equal(np.array(load_image(task.prompt[0].media[0].source)), np.array(picture("blue")))  # type: ignore[arg-type]


def test_sound_is_samples_or_a_wav_file(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as out:
        out.setnchannels(1), out.setsampwidth(2), out.setframerate(16000)
        out.writeframes(np.array([0, 16384, -32768], "<i2").tobytes())
    row = {"prompt": "<audio> or <audio>?", "audios": [str(tmp_path / "a.wav"), np.array([0.0, 0.5], np.float32)]}
    sources = [source for kind, source in prompt_of(row) if kind == "audio"]
    samples, rate = load_samples(sources[0])
    assert (samples.tolist(), rate) == ([0.0, 0.5, -1.0], 16000)


@pytest.mark.parametrize(
    "values",
    [
        np.array([0, 16384, -32768], np.int16),
        np.array([128, 192, 0], np.uint8),
        np.array([0, 2**30, -(2**31)], np.int32),
        [0.0, 0.5, -1.0],
    ],
)
def test_integer_samples_are_scaled_like_a_wav_file(values: Any, tmp_path: Path) -> None:
    part = {"type": "audio", "audio": values}
    for row in ({"prompt": "<audio>", "audios": [values]}, {"prompt": [{"role": "user", "content": [part]}]}):
        ((_, source),) = prompt_of(row)
        assert load_samples(source)[0].tolist() == [0.0, 0.5, -1.0]
    np.save(tmp_path / "a.npy", np.array(values))
    assert load_samples(str(tmp_path / "a.npy"))[0].tolist() == [0.0, 0.5, -1.0]


def test_integer_samples_of_unknown_volume_are_refused() -> None:
    with pytest.raises(DataError, match=r"from -32768 to 16384.* int16"):
        prompt_of({"prompt": "<audio>", "audios": [[0, 16384, -32768]]})
    ((_, source),) = prompt_of({"prompt": "<audio>", "audios": [[0, 1, -1]]})
    assert load_samples(source)[0].tolist() == [0.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image><image>", "images": ["a.png"]}, "has more markers than 'images' has images"),
        ({"prompt": "<image>", "images": ["a.png", "b.png"]}, "has 1 markers, but 'images' has 2 items"),
        ({"prompt": "x", "images": ["https://a.b/c.png"]}, "an image is the URL 'https://a.b/c.png'; nothing is downloaded"),
        ({"prompt": "x", "images": [7]}, "an image cannot be read from 7"),
        ({"prompt": "x", "images": [{"size": 3}]}, r"needs 'bytes', 'path' or 'url'; this one has \['size'\]"),
        ({"prompt": [{"role": "system", "content": "x"}], "images": ["a.png"]}, "has no user message for them"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "an image cannot be read from None"),
    ],
)
def test_row_that_does_not_fit_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data/tasks.jsonl, row 3: .*{message}"):
        task_from_row(row, index=3, split="train", source="data/tasks.jsonl")
