"""The embedded engine on prompts that show images: the trainer's logprobs, the cache between turns, any positions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.media import Media
from polyturn.core.messages import Message
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor, load_processor
from polyturn.training import hf
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.refusals import refuses_later
from support.samples import sample_of
from support.vision import (
    picture,
    sharp_vision_model,
    tiny_processor,
    tiny_vision_model,
    trainer_logprobs,
    vision_tokenizer,
)

TOKENIZER = vision_tokenizer()
CODEC = Codec(TOKENIZER)
PROCESSOR = MediaProcessor(tiny_processor(TOKENIZER), CODEC)


class Seer(NamedTuple):
    """A vision model, and the encoders of its prompts."""

    model: Any
    codec: Codec
    media: MediaProcessor

    def shown(self, *parts: object) -> tuple[np.ndarray, tuple[Media, ...]]:
        """Return the ids and media of a user's message with the generation prompt."""
        content = tuple({"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts)
        message = Message(role="user", content=content)
        text = self.codec.template.render([message], add_generation_prompt=True)
        return self.media.expand(self.codec.encode(text), [message]), message.media

    def check(self, ids: np.ndarray, media: Sequence[Media], completion: Completion, **options: float) -> None:
        """Check I8: the completion's logprobs are the trainer's."""
        expected = trainer_logprobs(self.model, self.media, ids, media, completion, **options)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>\n{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_seer() -> Seer:
    return Seer(sharp_vision_model(TOKENIZER), CODEC, PROCESSOR)


def llava_seer() -> Seer:
    """Return a model of another family, whose positions are those of text and whose images have one size."""
    tokenizer = tiny_tokenizer(320, chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 28, "width": 28}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="full", num_additional_image_tokens=1
    )
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **small},
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 512, **small},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    codec = Codec(tokenizer)
    return Seer(model, codec, MediaProcessor(processor, codec))


of_each_family = pytest.mark.parametrize("make", [qwen_seer, llava_seer])


def shown(*parts: object) -> tuple[np.ndarray, tuple[Media, ...]]:
    return Seer(None, CODEC, PROCESSOR).shown(*parts)


_count = iter(range(10**9))


def ask(ids: np.ndarray, media: Sequence[Media], *, session: str | None = None, **sampling: object) -> GenerateRequest:
    name = f"r{next(_count)}"
    options = {"max_tokens": 12, "banned_token_ids": PROCESSOR.token_ids, **sampling}
    return GenerateRequest(
        request_id=name, session_id=session or name, prompt_ids=ids, media=tuple(media), sampling=SamplingParams(**options)
    )


async def ask_all(engine: EmbeddedEngine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(r)) for r in requests]
    return [t.result() for t in tasks]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("prefill_chunk", [256, 5])
@of_each_family
async def test_logprobs_equal_the_trainers(make: Callable[[], Seer], temperature: float, prefill_chunk: int) -> None:
    """I8: prompts with several images of several sizes and one without, together in one batch."""
    seer = make()
    engine = EmbeddedEngine(seer.model, media=seer.media, prefill_chunk=prefill_chunk)
    prompts = [
        seer.shown(picture("red"), "Which?"),
        seer.shown("Compare ", picture("red", 84, 56), " with ", picture("blue", 28, 84), ", please."),
        seer.shown("No picture at all."),
        seer.shown(picture("green", 112, 112)),
    ]
    options = {"temperature": temperature, "banned_token_ids": seer.media.token_ids}
    completions = await ask_all(engine, [ask(*p, seed=i, **options) for i, p in enumerate(prompts)])
    for prompt, completion in zip(prompts, completions, strict=True):
        seer.check(*prompt, completion, temperature=temperature)


@of_each_family
async def test_later_turn_with_another_image_prefills_what_is_new(make: Callable[[], Seer]) -> None:
    seer = make()
    engine = EmbeddedEngine(seer.model, media=seer.media)
    ids, media = seer.shown(picture("red", 56, 56), "Which?")
    more = ids
    for turn in range(3):
        completion = await engine.generate(ask(ids, media, session="s", seed=turn, banned_token_ids=seer.media.token_ids))
        seer.check(ids, media, completion)
        if turn:
            assert completion.info["prefilled_tokens"] == len(more) + 1  # the last sampled token was never fed
        more, new = seer.shown("and now ", picture("blue", 28, 28 * (turn + 1)))
        ids, media = np.concatenate([ids, completion.token_ids, more]), (*media, *new)


async def test_gradients_of_images_reach_the_encoder() -> None:
    seer = llava_seer()
    ids, media = seer.shown(picture("red"), picture("blue"), "Which?")
    ones = np.concatenate([[0], np.ones(len(ids) - 1)]).astype(np.float32)
    sample = sample_of(("g", "t", 0), ids, ones, advantages=ones, media=media)
    policy = local_policy(seer.model, optim=OptimSettings(), media=seer.media)
    policy.forward_backward([sample, sample.replace(media=media[::-1])])
    assert all(p.grad is not None for name, p in seer.model.named_parameters() if "patch_embedding" in name)


async def test_equal_ids_with_other_pictures_share_no_cache() -> None:
    seer = qwen_seer()
    engine = EmbeddedEngine(seer.model, media=PROCESSOR)
    before = "Here is a picture that I want to ask something about. "
    red, blue = (shown(before, picture(color), " Tell me everything that you can see in it.") for color in ("red", "blue"))
    assert red[0].tolist() == blue[0].tolist()
    first = await engine.generate(ask(*red, seed=1))
    second, again = await engine.generate(ask(*blue, seed=1)), await engine.generate(ask(*red, seed=1))
    assert first.token_ids.tolist() == again.token_ids.tolist() != second.token_ids.tolist()
    seer.check(*blue, second)
    assert 0 < second.info["prefilled_tokens"] < len(blue[0])
    assert again.info["prefilled_tokens"] < second.info["prefilled_tokens"]


async def test_update_computes_prompt_and_pictures_anew() -> None:
    model = sharp_vision_model(TOKENIZER)
    engine = EmbeddedEngine(model, media=PROCESSOR)
    engine.max_burst_s = 0.0
    ids, media = shown(picture("red", 56, 84), "Which?")
    running = asyncio.create_task(engine.generate(ask(ids, media, max_tokens=40, seed=3)))
    while engine.stats.decoded_tokens < 5:  # noqa: ASYNC110 (the engine runs on this loop)
        await asyncio.sleep(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    await engine.update_weights(1)
    completion = await running
    (_, _), (changed, version) = completion.policy_versions
    assert version == 1
    expected = trainer_logprobs(model, PROCESSOR, ids, media, completion)
    np.testing.assert_allclose(completion.logprobs[changed:], expected[changed:], atol=1e-4)


async def test_banned_tokens_leave_the_logprobs_unchanged() -> None:
    seer = qwen_seer()
    engine = EmbeddedEngine(seer.model, media=PROCESSOR)
    ids, media = shown(picture("red"), "Which?")
    free = await engine.generate(ask(ids, media, seed=1, temperature=0.0, max_tokens=1, banned_token_ids=()))
    wanted = int(free.token_ids[0])
    for temperature in (0.0, 1.0):
        completion = await engine.generate(
            ask(ids, media, seed=1, temperature=temperature, max_tokens=40, banned_token_ids=(wanted, *PROCESSOR.token_ids))
        )
        assert wanted not in completion.token_ids
        seer.check(ids, media, completion)


async def test_media_that_do_not_fit_the_ids_are_refused() -> None:
    engine = EmbeddedEngine(tiny_vision_model(TOKENIZER), media=PROCESSOR)
    ids, media = shown(picture("red"), "Which?")
    await refuses_later(lambda: engine.generate(ask(ids, ())), EngineError, "no media")
    await refuses_later(lambda: engine.generate(ask(ids, shown(picture("red", 56, 56))[1])), EngineError, "other media")
    await refuses_later(lambda: engine.generate(ask(ids, media * 2)), EngineError, "2 media")
    with pytest.raises(EngineError, match="must follow"):
        await engine.generate(ask(ids[: 1 + np.flatnonzero(np.isin(ids, PROCESSOR.token_ids))[-1]], media))
    assert EmbeddedEngine(tiny_vision_model(TOKENIZER)).capabilities.media is False
    assert engine.capabilities.media is True


def test_model_with_bidirectional_image_tokens_is_refused() -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(TOKENIZER), "head_dim": 16, "num_key_value_heads": 1, "max_position_embeddings": 64, **small}
    config = Gemma3Config(text_config={**text, "layer_types": ["full_attention"]}, vision_config={"image_size": 28, **small})
    with pytest.raises(ConfigError, match="Gemma3ForConditionalGeneration"):
        EmbeddedEngine(Gemma3ForConditionalGeneration(config), media=PROCESSOR)


def test_model_and_processor_come_back_from_a_folder(tmp_path: Path) -> None:
    """An exported model loads, and its processor handles an image as before."""
    model, codec, media = llava_seer()
    saved = hf.save_model(model, tmp_path / "model", tokenizer=codec.tokenizer, processor=media.processor)
    again = MediaProcessor(load_processor(str(saved)), codec)
    (medium,) = Message(role="user", content=({"image": picture("red")},)).media
    torch.testing.assert_close(again.inputs([medium])["pixel_values"], media.inputs([medium])["pixel_values"])
    loaded = hf.load_model(saved)
    assert hf.takes_media(loaded)
    assert type(loaded) is type(model)
