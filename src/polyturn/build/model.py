"""Build the tokenizer with its template, the model, and its media processor, from the section `model`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.config.models import RunConfig, TrainTokenizerConfig
from polyturn.core.errors import PLUGIN_RAISES, ConfigError, one_line, raised_at
from polyturn.infra.live import LiveObject, NameOrObject, names_code
from polyturn.infra.plugins import import_attr
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.multimodal import MediaProcessor, load_processor
from polyturn.tokens.templates import template_source
from polyturn.tokens.train import train_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


logger = logging.getLogger(__name__)


def set_up_torch(config: RunConfig) -> None:
    """Set torch's threads and seed."""
    import torch

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)


def build_codec(config_source: ConfigSource, *, checkpoint: Path | None = None) -> Codec:
    """Load the tokenizer, or train the one described by `model.tokenizer`; set the chat template."""
    model = config_source.config.model
    template = None
    if model.chat_template is not None:
        template = template_source(model.chat_template, base=config_source.base, key="model.chat_template")
    kwargs = model.template_kwargs
    source = model.tokenizer or model.path
    if checkpoint is not None:
        codec = load_codec(str(checkpoint), chat_template=template, template_kwargs=kwargs)
    elif isinstance(source, TrainTokenizerConfig):
        texts = _corpus(source.corpus, config_source)
        trained = train_tokenizer(texts, vocab_size=source.vocab_size, chat_template=template)
        codec = Codec(trained, template_kwargs=kwargs)
    elif isinstance(source, LiveObject):
        codec = Codec(source.target, chat_template=template, template_kwargs=kwargs)
    else:
        assert source is not None  # the config model requires one of the two
        revision = model.revision if model.tokenizer is None else None
        codec = load_codec(
            folder_or_name(source, config_source.base), revision=revision, chat_template=template, template_kwargs=kwargs
        )
    codec.tokenizer.chat_template = codec.chat_template  # an exported model then has the template it was trained with
    return codec


def _corpus(name: NameOrObject, source: ConfigSource) -> list[str]:
    function = import_attr(name, base=source.base, key="model.tokenizer.corpus")
    if not callable(function):
        raise ConfigError(
            f"model.tokenizer.corpus names {name!r}, which is {function!r:.100}; name a function that returns texts"
        )
    try:
        texts = list(function())
    except Exception as problem:
        raise ConfigError(f"model.tokenizer.corpus: {name!r} raised {one_line(problem)}{raised_at(problem)}") from problem
    if not all(isinstance(text, str) for text in texts):
        other = next(text for text in texts if not isinstance(text, str))
        raise ConfigError(
            f"model.tokenizer.corpus: {name!r} returned {other!r:.100} among its texts; return a list of texts"
        )
    return texts


def build_model(
    source: ConfigSource, tokenizer: PreTrainedTokenizerFast, *, checkpoint: Path | None = None
) -> PreTrainedModel:
    """Load the model, or make one with random weights from `model.init`; add the adapter of `model.lora`.

    With `source.reads_parts` the weights of a folder are not read here; a rank reads them later, into its shards.
    """
    from polyturn.training import hf, lora

    adapter = source.config.model.lora
    if checkpoint is not None and not (checkpoint / lora.CONFIG_FILE).is_file():
        built = hf.load_model(checkpoint, dtype=_dtype(source.config.model.dtype))
    elif checkpoint is not None and adapter is None:
        raise ConfigError(
            f"{checkpoint} contains an adapter and model.lora is not set; set model.lora as in the adapter's run, or "
            "export merged weights"
        )
    else:
        built = _base_model(source, tokenizer)
    kernels = source.config.model
    hf.choose_kernels(built, attention=kernels.attn_implementation, liger=kernels.liger)
    if adapter is None:
        return built
    lora.add_lora(built, adapter, seed=source.config.seed)
    if checkpoint is not None and (checkpoint / lora.CONFIG_FILE).is_file():
        lora.load_adapter(built, checkpoint)
    elif adapter.adapter is not None:
        lora.load_adapter(built, source.base / os.path.expanduser(adapter.adapter))
    return built


def on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    """Move the model to the GPU, if there is one and the model has weights, and return it."""
    import torch

    from polyturn.training.process_group import use_tensor_cores

    if torch.cuda.is_available() and model.device.type != "meta":
        use_tensor_cores()
        model.to("cuda")  # type: ignore[arg-type]  # a mixin of transformers hides the signature
    return model


def build_outline(source: ConfigSource, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Create the model without weights, only config and shapes, for a process that neither trains nor samples."""
    import torch

    model = source.config.model
    if model.init is not None or model.path is None or isinstance(model.path, LiveObject):
        with torch.device("meta"):
            return _base_model(source, tokenizer)
    return outline_of(source, model.path)


def outline_of(source: ConfigSource, path: str) -> PreTrainedModel:
    """Make the model of a folder or hub name without weights, in the dtype of the run."""
    from polyturn.training import hf

    model = source.config.model
    return hf.load_outline(folder_or_name(path, source.base), dtype=_dtype(model.dtype), revision=model.revision)


def load_frozen(
    source: ConfigSource, path: str, *, like: PreTrainedModel, dtype: str | None, needs_head: bool = True
) -> PreTrainedModel:
    """Load a further model, without an adapter, on the device of `like`; with `source.reads_parts`, without weights. Without
    `needs_head`, its folder may lack the output embedding."""
    from polyturn.training import hf

    load = hf.load_unread if source.reads_parts else hf.load_model
    name, number = folder_or_name(path, source.base), _dtype(dtype or source.config.model.dtype)
    model = load(name, dtype=number, needs_head=needs_head)
    kernels = source.config.model
    hf.choose_kernels(model, attention=kernels.attn_implementation, liger=kernels.liger)
    if source.reads_parts:
        return model
    return model.to(like.device)  # type: ignore[arg-type]  # a mixin of transformers hides the signature


def _dtype(name: str) -> torch.dtype:
    import torch

    has_gpu = torch.cuda.is_available()
    has_bfloat16 = has_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bfloat16" and has_gpu and not has_bfloat16:
        raise ConfigError(
            f"model.dtype is bfloat16, and {torch.cuda.get_device_name()} does not support bfloat16; set model.dtype=float32"
        )
    return torch.bfloat16 if name == "bfloat16" or (name == "auto" and has_bfloat16) else torch.float32


def _base_model(source: ConfigSource, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    from polyturn.training import hf

    model = source.config.model
    dtype = _dtype(model.dtype)
    if model.init is not None:
        fields = {
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            **model.init,
        }
        return hf.build_model(fields, seed=source.config.seed, dtype=dtype)
    assert model.path is not None  # the config model requires one of the two
    if isinstance(model.path, LiveObject):
        model_object: PreTrainedModel = model.path.target
        return model_object
    load = hf.load_plan if source.is_plan else hf.load_unread if source.reads_parts else hf.load_model
    return load(folder_or_name(model.path, source.base), dtype=dtype, revision=model.revision)


def max_context_of(
    wanted: int | None, model: PreTrainedModel, *, default: int = 4096, key: str = "rollout.limits.max_context"
) -> int:
    """Return the largest length of a conversation, in tokens.

    Raises:
        ConfigError: `wanted`, from `key`, is more than the model has positions.
    """
    own = int(model.config.get_text_config().max_position_embeddings)
    length = wanted or min(own, default)
    if length > own:
        raise ConfigError(f"{key} is {length} and the model has {own} positions; lower it")
    return length


def build_media(config_source: ConfigSource, codec: Codec, model: PreTrainedModel) -> MediaProcessor | None:
    """Make the processor of a model that reads more than text; None for a text model."""
    from polyturn.training import hf

    config = config_source.config.model
    name = config.processor
    if name == "none" or (name is None and (config.path is None or not hf.takes_media(model))):
        return None
    if name is not None and names_code(name):
        make = import_attr(name, base=config_source.base, key="model.processor")
        try:
            processor = make(codec.tokenizer)
        except PLUGIN_RAISES as problem:
            raise ConfigError(f"model.processor: {name!r} raised {one_line(problem)}{raised_at(problem)}") from problem
        return MediaProcessor(processor, codec)
    try:
        source = folder_or_name(str(name or config.path), config_source.base)
        return MediaProcessor(load_processor(source, revision=config.revision if name is None else None), codec)
    except ConfigError as problem:
        if name is not None:
            raise
        logger.warning("the model gets no images, videos or sounds in this run: %s", problem)
        return None
