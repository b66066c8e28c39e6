"""Media in conversations: incremental encoding equals one pass of the processor over the whole conversation."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import threading
import warnings
import wave
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from polyturn.core.arrays import Ids
from polyturn.core.errors import ConfigError, DataError, TemplateError
from polyturn.core.media import Media
from polyturn.core.messages import Message, ToolCall
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.multimodal import (
    FORMATS,
    Expansion,
    MediaProcessor,
    _load_frames,
    decode_image,
    load_image,
    load_processor,
    load_samples,
)
from polyturn.tokens.positions import MediaRows
from support.refusals import refuses
from support.vision import (
    picture,
    tiny_processor,
    tiny_vision_model,
    vision_tokenizer,
)

TOKENIZER = vision_tokenizer()
CODEC = Codec(TOKENIZER)
PROCESSOR = tiny_processor(TOKENIZER)
MEDIA = MediaProcessor(PROCESSOR, CODEC)
MODEL = tiny_vision_model(TOKENIZER)
TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}


def says(role: str, *parts: object, **fields: object) -> Message:
    """Return a message; a list is a video, an image an image, a string text."""
    kinds = [
        ("text", "text") if isinstance(p, str) else ("video",) * 2 if isinstance(p, list) else ("image",) * 2 for p in parts
    ]
    return Message(role=role, content=tuple({"type": t, k: p} for (t, k), p in zip(kinds, parts, strict=True)), **fields)


def dialogue() -> list[Message]:
    """Images in the prompt, two in a tool's result, text, and a video in a user's reply."""
    call = ToolCall(id="c0", name="zoom")
    return [
        Message(role="system", content="Look closely."),
        says("user", picture("red", 84, 56), "Which color? ", picture("blue")),
        Message(role="assistant", content="", tool_calls=(call,)),
        says("tool", picture("green", 28, 84), picture("red"), "zoomed", tool_call_id="c0", name="zoom"),
        Message(role="assistant", content="It is green."),
        Message(role="user", content="And now?"),
        Message(role="assistant", content="Hm."),
        says("user", [picture("red", 56, 28), picture("blue", 56, 28), picture("green", 56, 28)], "moves"),
    ]


def incremental(encoder: DeltaEncoder, messages: list[Message]) -> Ids:
    """Encode a conversation as an episode does: the prompt, the completions, and the observations."""
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    ids = [encoder.start(messages[: turns[0]])]
    for at, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        ids.append(encoder.assistant(messages[at]))
        ids.append(encoder.extend(messages[at + 1 : end], last_id=int(ids[-1][-1])))
    return np.concatenate(ids)


def test_collapse_undoes_expand() -> None:
    messages = dialogue()
    short = CODEC.encode(CODEC.template.render(messages, tools=(TOOL,)))
    media = [m for message in messages for m in message.media]
    long = MEDIA.expand(short, messages)
    assert len(long) > len(short)
    assert MEDIA.collapse(long, media).tolist() == short.tolist()
    refuses(lambda: MEDIA.collapse(long[:3], media), TemplateError, "number 1")


def test_ids_positions_and_inputs_equal_one_pass() -> None:
    messages, encoder = dialogue(), DeltaEncoder(CODEC, tools=(TOOL,), media=MEDIA)
    ids = incremental(encoder, messages)
    images = [picture("red", 84, 56), picture("blue"), picture("green", 28, 84), picture("red")]
    video = [picture("red", 56, 28), picture("blue", 56, 28), picture("green", 56, 28)]
    text = CODEC.template.render(messages, tools=(TOOL,), add_generation_prompt=True)
    whole = PROCESSOR(text=[text], images=images, videos=[video], return_tensors="pt")
    assert ids.tolist() == whole["input_ids"][0].tolist() == encoder.start(messages).tolist()
    media = [medium for message in messages for medium in message.media]
    row = MediaRows(MODEL, MEDIA).row(ids, media)
    assert row.types.tolist() == whole["mm_token_type_ids"][0].tolist()
    assert set(row.inputs) == {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"}
    for name, value in row.inputs.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
    grids = {name: whole[name] for name in ("image_grid_thw", "video_grid_thw")}
    positions, deltas = MODEL.model.get_rope_index(whole["input_ids"], mm_token_type_ids=whole["mm_token_type_ids"], **grids)
    assert row.positions is not None
    np.testing.assert_array_equal(row.positions, positions[:, 0].numpy())
    assert row.offset == int(deltas[0, 0])


def test_positions_of_a_prefix_are_a_prefix() -> None:
    messages, rows = dialogue(), MediaRows(MODEL, MEDIA)
    media = [medium for message in messages for medium in message.media]
    ids = incremental(DeltaEncoder(CODEC, media=MEDIA), messages)
    whole = rows.row(ids, media)
    ends = [t for t in range(1, len(ids)) if not (whole.types[t - 1] and whole.types[t])]
    for end in ends[::5]:
        part = rows.row(ids[:end], media)
        positions = np.tile(np.arange(end), (3, 1)) if part.positions is None else part.positions
        np.testing.assert_array_equal(positions, whole.positions[:, :end])
    out = rows.stack([(CODEC.encode("no")[:1], ())], width=7, device="cpu")
    assert out["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6]], "a row of text"


PLACEHOLDERS = "<|vision_start|><|image_pad|><|vision_end|> <|video_pad|> <|image_pad|>"


def test_spelled_placeholder_is_text() -> None:
    """In a prompt, a tool's result beside an image, a user's reply, and the model's own text."""
    encoder = DeltaEncoder(CODEC, tools=(TOOL,), media=MEDIA)
    call = ToolCall(id="c0", name="zoom", arguments={"x": PLACEHOLDERS})
    messages = [
        says("user", PLACEHOLDERS, picture("red")),
        Message(role="assistant", content=PLACEHOLDERS, tool_calls=(call,)),
        says("tool", PLACEHOLDERS, picture("blue", 56, 28), tool_call_id="c0", name="zoom"),
        Message(role="assistant", content="x"),
        Message(role="user", content=PLACEHOLDERS),
    ]
    assert MEDIA.types(encoder.start(messages[:1])).sum() == 1
    assert MEDIA.types(encoder.start(messages)).sum() == 3
    assert MEDIA.types(encoder.full(messages)).sum() == 3
    observation = encoder.extend(messages[2:3], last_id=None)
    assert MEDIA.types(observation).sum() == 2
    assert PLACEHOLDERS in CODEC.decode(observation)
    assert not MEDIA.types(encoder.extend(messages[4:], last_id=None)).any()


def test_image_is_processed_once() -> None:
    processor = tiny_processor(TOKENIZER)
    media = MediaProcessor(processor, CODEC)
    message = says("user", picture("red"), picture("red"), picture("blue"))
    DeltaEncoder(CODEC, media=media).start([message])
    first, second, _ = message.media
    assert media.expansion(first) is media.expansion(second)
    assert media.inputs(message.media)["image_grid_thw"].tolist() == [[1, 2, 2]] * 3


def test_cache_of_processed_media_is_bounded() -> None:
    one = MEDIA.expansion(says("user", picture("red")).media[0]).num_bytes
    media = MediaProcessor(PROCESSOR, CODEC, max_cached_bytes=2 * one)
    shown = [says("user", picture(color)).media[0] for color in ("red", "blue", "green", "black")]
    made = [media.expansion(medium) for medium in shown]
    assert media.expansion(shown[3]) is made[3]
    assert media.expansion(shown[0]) is not made[0]


def gemma() -> tuple[Gemma3Processor, Codec]:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = tiny_tokenizer(400, texts=["\n\n\n a\n\n b \n\n\n"] * 50, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    tokenizer._set_model_specific_special_tokens(tokens)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return Gemma3Processor(images, tokenizer, image_seq_length=4), Codec(tokenizer)


def test_text_at_the_edges_of_an_expansion_merges() -> None:
    processor, codec = gemma()
    media = MediaProcessor(processor, codec)
    message = says("user", "a\n", picture("red"), "\n b \n", picture("blue"), picture("green"), "c")
    ids = DeltaEncoder(codec, media=media).start([message])
    text = codec.template.render([message], add_generation_prompt=True)
    images = [[picture("red"), picture("blue"), picture("green")]]
    whole = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    assert ids.tolist() == whole["input_ids"][0].tolist()
    assert media.types(ids).tolist() == whole["token_type_ids"][0].tolist()
    torch.testing.assert_close(media.inputs(message.media)["pixel_values"], whole["pixel_values"])


def of_file(path: str) -> Media:
    return Message(role="user", content=({"image": path},)).media[0]


PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\nx<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("work", "error", "key"),
    [
        (lambda: MediaProcessor(PROCESSOR, Codec(tiny_tokenizer())), ConfigError, r"'<\|image_pad\|>'"),
        (lambda: DeltaEncoder(CODEC).start([says("user", picture("red"))]), ConfigError, r"model\.processor"),
        (
            lambda: DeltaEncoder(
                codec := Codec(vision_tokenizer(chat_template=PLAIN)), media=MediaProcessor(PROCESSOR, codec)
            ).start([says("user", picture("red"))]),
            TemplateError,
            r"\['image'\]",
        ),
        (lambda: load_processor("/nowhere"), ConfigError, "/nowhere"),
        (lambda: MEDIA.expansion(of_file(__file__)), DataError, "not an image"),
        (lambda: MEDIA.expansion(of_file("/nowhere/b.png")), DataError, r"b\.png"),
    ],
    ids=["no image token", "no processor", "no placeholder", "no folder", "no image", "no file"],
)
def test_missing_part_is_an_error_that_names_it(work: Callable[[], object], error: type[Exception], key: str) -> None:
    with pytest.raises(error, match=key):
        work()


def test_kind_that_the_processor_lacks_is_refused() -> None:
    media = MediaProcessor(tiny_processor(TOKENIZER, videos=False), CODEC)
    encoder = DeltaEncoder(CODEC, media=media)
    refuses(lambda: encoder.start([says("user", [picture("red"), picture("blue")])]), DataError, "video_processor")
    sound = Message(role="user", content=({"type": "audio", "audio": np.zeros(8, np.float32)},))
    refuses(lambda: encoder.start([sound]), DataError, "feature_extractor")


def large_png(width: int, height: int) -> str:
    """Return a file of kilobytes that holds a white image of one bit a pixel, as a data URI."""
    lines = zlib.compress((b"\0" + b"\xff" * ((width + 7) // 8)) * height, 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", lines), (b"IEND", b""))
    framed = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(framed)).decode()


def test_jpeg_of_many_scans_is_refused_undecoded() -> None:
    written = io.BytesIO()
    Image.new("RGB", (64, 64)).save(written, "JPEG", progressive=True)
    data = written.getvalue()
    assert decode_image(data, what="a picture").size == (64, 64)
    last = data[data.rindex(b"\xff\xda") : -2]
    refuses(lambda: decode_image(data[:-2] + last * 200 + data[-2:], what="a picture"), DataError, "a picture", "scans")


@pytest.mark.parametrize("side", [6_000, 15_000])
def test_image_with_too_many_pixels_is_refused_undecoded(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(self: Image.Image, mode: str) -> Image.Image:
        raise AssertionError("its pixels were decoded")

    monkeypatch.setattr(Image.Image, "convert", convert)
    refuses(lambda: load_image(large_png(side, side)), DataError, "pixels")


def file_of(kind: str) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((40, 30), 50).convert("1" if kind in ("MSP", "XBM") else "RGB").save(file, kind)
    return file.getvalue()


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICNS", "XBM"])
def test_file_of_a_rare_format_is_not_an_image(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands PostScript to Ghostscript, whatever a data URI says that it is."""
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: pytest.fail("a program was started"))
    refuses(lambda: load_image(uri(file_of(kind))), DataError, "not an image")


Image.init()
FILES = {kind: file_of(kind) for kind in FORMATS if kind in Image.SAVE}


@given(st.sampled_from(sorted(FILES)), st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), max_size=8), st.data())
def test_damaged_file_is_an_image_or_a_data_error(kind: str, changes: list[tuple[int, int]], data: st.DataObject) -> None:
    file = bytearray(FILES[kind])
    for place, value in changes:
        file[place % len(file)] = value
    with contextlib.suppress(DataError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_image(uri(bytes(file[: data.draw(st.integers(0, len(file)))] if data.draw(st.booleans()) else file)))


def test_frames_of_a_video_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(source: str) -> Image.Image:
        loaded.append(source)
        return Image.new("1", (5_000, 5_000))

    monkeypatch.setattr("polyturn.tokens.multimodal.load_image", load)
    refuses(lambda: _load_frames(("data:",) * 100), DataError, "100 frames")
    assert len(loaded) == 6


async def test_media_are_processed_once_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    media, threads = MediaProcessor(PROCESSOR, CODEC), []
    process = MediaProcessor._process

    def seen(self: MediaProcessor, medium: Media) -> Expansion:
        threads.append(threading.get_ident())
        return process(self, medium)

    monkeypatch.setattr(MediaProcessor, "_process", seen)
    messages = [says("user", picture("red"), picture("blue"), picture("red"))]
    await media.prepare(messages)
    await media.prepare(messages)
    media.expand(CODEC.encode(CODEC.template.render(messages)), messages)
    assert len(threads) == 2 and threading.get_ident() not in threads


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(3,)", "(-1,)"])
def test_samples_that_claim_another_length_are_refused(shape: str) -> None:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + b"\0" * 4
    refuses(
        lambda: load_samples("data:application/x-npy;base64," + base64.b64encode(data).decode()),
        DataError,
        "array of samples",
    )


def test_eight_bit_samples_lie_around_their_middle() -> None:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setparams((1, 1, 8000, 0, "NONE", ""))
        sound.writeframes(bytes([0, 64, 128, 192]))
    samples, rate = load_samples("data:audio/wav;base64," + base64.b64encode(out.getvalue()).decode())
    assert samples.tolist() == [-1.0, -0.5, 0.0, 0.5] and rate == 8000
