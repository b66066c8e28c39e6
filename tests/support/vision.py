"""A tiny model that sees, made at run time: transformers' own Qwen2-VL classes with random weights, nothing downloaded.

    tokenizer = vision_tokenizer();  processor = tiny_processor(tokenizer);  model = tiny_vision_model(tokenizer)

The processor is the real one with its Pillow image backend. Its video part is torchvision's, which is not needed here: the
frames of a video are cut into patches by `FrameProcessor`, two frames a patch as in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    BatchFeature,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from polyturn.core.generation import Completion
from polyturn.core.media import Media
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.samples import sample_of

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

VISION_TEMPLATE = """\
{%- macro say(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}{{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- say(messages[0].content) + '\\n\\n' -}}{%- endif -%}
    {{- 'Tools:\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
    {{- 'Call a tool with <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + say(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + say(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- elif message.role != 'system' -%}
        {{- '<|im_start|>' + message.role + '\\n' + say(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
            {{- '\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML with hermes tools, in which every message may show images and videos."""


def vision_tokenizer(vocab_size: int = 320, *, chat_template: str = VISION_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with the tokens that stand for images and videos."""
    tokenizer = tiny_tokenizer(vocab_size, chat_template=chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    return tokenizer


def picture(color: str, width: int = 28, height: int = 28) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def trainer_logprobs(
    model: Any, media: MediaProcessor, ids: np.ndarray, images: Sequence[Media], completion: Completion, **options: Any
) -> np.ndarray:
    """Return the trainer's scores of the completion after the prompt `ids`; `options` are the sample's."""
    token_ids = np.concatenate([ids, completion.token_ids])
    weights = np.concatenate([np.zeros(len(ids)), np.ones(len(completion.token_ids))])
    sample = sample_of(("g", "t", 0), token_ids, weights, media=tuple(images), **options)
    return local_policy(model, optim=OptimSettings(), media=media).score([sample])[0][len(ids) :]


class FrameProcessor:
    """Cuts videos, given as lists of frames, into the patches that the model reads: [patches, 3 * 2 * 14 * 14]."""

    merge_size = 2

    def __init__(self, images: Qwen2VLImageProcessorPil) -> None:
        self._images = images

    def __call__(self, videos: Sequence[Sequence[Any]], **kwargs: Any) -> BatchFeature:
        patches, grids = [], []
        for frames in videos:
            padded = [*frames, frames[-1]] if len(frames) % 2 else list(frames)
            out = self._images(padded, return_tensors="np")
            _, height, width = out["image_grid_thw"][0].tolist()
            # Each frame's patches hold the frame twice in time; a video's hold a frame and the next one.
            frames_FPCTX = out["pixel_values"].reshape(len(padded), height * width, 3, 2, -1)
            pairs = np.stack([frames_FPCTX[0::2, :, :, 0], frames_FPCTX[1::2, :, :, 0]], axis=3)
            patches.append(pairs.reshape(-1, out["pixel_values"].shape[1]))
            grids.append([len(padded) // 2, height, width])
        return BatchFeature(
            {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids)}, tensor_type="pt"
        )


class TinyVisionProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor with the Pillow image part, and `FrameProcessor` for videos unless they are left out."""

    def __init__(self, image_processor: Any, tokenizer: Any, *, videos: bool = True) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer)
        if videos:
            self.video_processor = FrameProcessor(image_processor)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write the files of Qwen2-VL's own processor, which a server loads."""
        self.tokenizer.save_pretrained(save_directory)
        return self.image_processor.save_pretrained(save_directory)


def tiny_processor(tokenizer: PreTrainedTokenizerFast, *, videos: bool = True) -> TinyVisionProcessor:
    """Return a processor that gives an image of 28 x 28 pixels one token, up to 16 tokens an image."""
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=16 * 28 * 28, patch_size=14, merge_size=2)
    return TinyVisionProcessor(images, tokenizer, videos=videos)


def tiny_vision_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int = 32, layers: int = 2, max_positions: int = 4096, seed: int = 0
) -> Qwen2VLForConditionalGeneration:
    """Build a randomly initialised Qwen2-VL in float32, in eval mode, on the CPU: about 0.1 million parameters."""
    begin, end, image, video = (int(str(tokenizer.convert_tokens_to_ids(token))) for token in VISION_TOKENS)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": max_positions,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [hidden // 16, hidden // 16, hidden // 8],
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "in_chans": 3,  # as the published configs call it, which a server may look for
            "embed_dim": 32,
            "hidden_size": hidden,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config)
    return model.float().eval()


def sharp_vision_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    """Return the tiny model with weights large enough that a wrong position or picture shows in its logprobs."""
    model = tiny_vision_model(tokenizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6 if "language_model" in name else 3)
    return model
