"""Small tokenizers of the kinds that published models have, each finding and surrounding control tokens in its own way.

byte_level     no space is added, control tokens are found as they are               Qwen, Llama 3
metaspace      a space is put before a text, and behind a control token again        Llama 2
rstrip         the same, and a control token takes the white space behind it         Phi-3
normalizing    control tokens are found in the text's NFKC form: "＜" is "<"
plain_special  some control tokens look like words

tokenizer_of("rstrip", markers=("<|user|>", "<|end|>"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.testing.tiny_models import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZERS = ("byte_level", "metaspace", "rstrip", "normalizing", "plain_special")
WORDS = ("END", "USER:")
"""The control tokens of `plain_special` that look like words."""


def tokenizer_of(kind: str, *, markers: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind, with `markers` as control tokens.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in TOKENIZERS:
        raise ConfigError(f"there is no tokenizer of the kind {kind!r}.{did_you_mean(kind, TOKENIZERS)}")
    from tokenizers import AddedToken, normalizers

    tokenizer = _sentencepiece() if kind in ("metaspace", "rstrip") else tiny_tokenizer()
    if kind == "normalizing":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    if kind == "plain_special":
        markers = (*markers, *WORDS)
    tokens = [
        AddedToken(m, special=kind != "normalizing", normalized=kind == "normalizing", rstrip=kind == "rstrip")
        for m in markers
    ]
    tokenizer.add_tokens(tokens, special_tokens=kind != "normalizing")  # type: ignore[arg-type]
    return tokenizer


def _sentencepiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer with byte fall-back over a string that begins with a space."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = ["▁", *map(chr, range(33, 127))]
    merged = ["▁t", "▁a", "▁i", "th", "in", "er", "▁th", "▁the", "an", "is", "▁is"]
    pairs = [(t[:-1], t[-1]) for t in ("▁t", "▁a", "▁i", "th", "in", "er")]
    merges = [*pairs, ("▁t", "h"), ("▁th", "e"), ("a", "n"), ("i", "s"), ("▁i", "s")]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged]
    model = models.BPE(
        {word: number for number, word in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=32768
    )
