"""A vision model with plain positions 0, 1, 2, … works as one with three positions a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.messages import Message
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.multimodal import MediaProcessor, load_processor
from polyturn.training import hf
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.samples import sample_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>\n{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make() -> tuple[LlavaForConditionalGeneration, DeltaEncoder, MediaProcessor]:
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
    media = MediaProcessor(processor, codec)
    return model, DeltaEncoder(codec, media=media), media


async def test_two_turns_with_images_have_the_trainers_logprobs() -> None:
    model, encoder, media = make()
    engine = EmbeddedEngine(model, media=media)
    colors = iter(["red", "blue"])

    def shown() -> Message:
        image = Image.new("RGB", (28, 28), next(colors))
        return Message(role="user", content=({"image": image}, {"type": "text", "text": "Which?"}))

    first, second = shown(), shown()
    ids, rollout, weights = encoder.start([first]), [], []
    items = first.media
    for turn in range(2):
        sampling = SamplingParams(max_tokens=8, seed=turn, banned_token_ids=media.token_ids)
        request = GenerateRequest(request_id=str(turn), session_id="s", prompt_ids=ids, sampling=sampling, media=items)
        done = await engine.generate(request)
        logprobs = done.logprobs
        assert logprobs is not None
        rollout += [np.zeros(len(ids) - sum(map(len, rollout))), logprobs]
        weights += [np.zeros(len(rollout[-2])), np.ones(len(logprobs))]
        ids = np.concatenate([ids, done.token_ids])
        if not turn:
            ids, items = np.concatenate([ids, encoder.extend([second], last_id=int(ids[-1]))]), (*items, *second.media)
    assert (media.types(ids) == 1).sum() == 2 * 5
    sample = sample_of(("g", "t", 0), ids, np.concatenate(weights), advantages=np.ones(len(ids), np.float32), media=items)
    policy = local_policy(model, optim=OptimSettings(), media=media)
    np.testing.assert_allclose(policy.score([sample])[0], np.concatenate(rollout), atol=1e-4)
    policy.forward_backward([sample, sample.replace(media=items[::-1])])
    assert all(p.grad is not None for name, p in model.named_parameters() if "patch_embedding" in name)


def test_model_and_processor_come_back_from_a_folder(tmp_path: Path) -> None:
    """What a run exports is loaded as others load it, and processes an image as before."""
    model, encoder, media = make()
    saved = hf.save_model(model, tmp_path / "model", tokenizer=encoder.codec.tokenizer, processor=media.processor)
    again = MediaProcessor(load_processor(str(saved)), encoder.codec)
    (medium,) = Message(role="user", content=({"image": Image.new("RGB", (28, 28), "red")},)).media
    torch.testing.assert_close(again.inputs([medium])["pixel_values"], media.inputs([medium])["pixel_values"])
    loaded = hf.load_model(saved)
    assert hf.takes_media(loaded)
    assert type(loaded) is type(model)
