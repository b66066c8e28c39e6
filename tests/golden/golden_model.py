"""A tokenizer and a model that are the same on every machine: merges written down, weights drawn by NumPy's old generator.

    write_model(folder)                      folder/tokenizer.json, config.json, model.safetensors, chat template
    write_model(folder, is_vision=True)      a Qwen2-VL of the same size, whose processor `processor` builds

Nothing of polyturn is used here: what a fixture starts from must not move when polyturn does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "assistant system user the answer question number What think wrong right again look price name arguments result type "
    "function description parameters properties object string integer required"
)
"""What the tokenizer has merges for: every beginning of these, with a space before it and without."""
TURN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


def make_tokenizer(template: Path) -> Any:
    """Return a byte-level BPE tokenizer with ChatML tokens and the chat template of that file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in [start + text for text in WORDS.split() for start in ("", "Ġ")]:
        for end in range(1, len(word)):
            if word[: end + 1] not in vocabulary:
                merges.append((word[:end], word[end]))
                vocabulary[word[: end + 1]] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*TURN_TOKENS, *VISION_TOKENS)])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def make_model(tokenizer: Any, *, is_vision: bool = False) -> Any:
    """Return a model of a few thousand parameters in float32, in eval mode."""
    import torch
    import transformers

    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if is_vision:
        begin, end, image = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        model: Any = transformers.Qwen2VLForConditionalGeneration(
            transformers.Qwen2VLConfig(
                text_config={**text, "rope_parameters": rope},
                vision_config={
                    "depth": 1,
                    "in_chans": 3,
                    "embed_dim": 16,
                    "hidden_size": 16,
                    "num_heads": 2,
                    "mlp_ratio": 2,
                    "patch_size": 14,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                },
                image_token_id=image,
                vision_start_token_id=begin,
                vision_end_token_id=end,
                tie_word_embeddings=True,
            )
        )
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text, head_dim=8))
    draw = np.random.RandomState(0)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            values = 0.2 * draw.standard_normal(tuple(tensor.shape))
            tensor.copy_(torch.from_numpy(1.0 + values if "norm" in name and "bias" not in name else values))
    return model.float().eval()


def write_model(folder: Path, *, template: Path, is_vision: bool = False) -> None:
    """Write a tokenizer and a model as Hugging Face folders have them."""
    tokenizer = make_tokenizer(template)
    make_model(tokenizer, is_vision=is_vision).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def processor(tokenizer: Any) -> Any:
    """Return Qwen2-VL's processor with its Pillow image part and without a video part, which would need torchvision."""
    from transformers import ProcessorMixin, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class PictureProcessor(Qwen2VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any) -> None:
            self.image_token, self.video_token = VISION_TOKENS[2], "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = None
            ProcessorMixin.__init__(self, image_processor, tokenizer)

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            """Write the files of Qwen2-VL's own processor."""
            self.tokenizer.save_pretrained(save_directory)
            return self.image_processor.save_pretrained(save_directory)

    pictures = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=16 * 28 * 28, patch_size=14, merge_size=2)
    return PictureProcessor(pictures, tokenizer)
