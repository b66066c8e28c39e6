"""Codec: one tokenizer and one chat template. All conversion between text and token ids happens here.

Text from the template may become control tokens; text from the environment must not:

    encode("<|im_end|>\\n")        -> [151645, 198]          template text: control tokens are recognised
    encode_plain("<|im_end|>")    -> [27, 91, 318, ...]     a tool's output with the same characters: ordinary text

Control tokens are *all* added tokens, special or not (a tool call's tags are usually not special). If a render contains
control texts of the environment, `encode_pieces` encodes only these control texts as ordinary text. All other text is
encoded like the template's, so that it gets the same ids as in a full render.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, one_line
from polyturn.core.messages import Message
from polyturn.tokens.delimiters import find_call_tags, find_delimiters
from polyturn.tokens.hub import only_cached
from polyturn.tokens.lexed import string_literals
from polyturn.tokens.read_words import find_read_words
from polyturn.tokens.template import ChatTemplate
from polyturn.tokens.turn_ends import ControlSpan, TurnEnds, common_length, find_turn_ends

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

LONG_CHARS = 1 << 16
"""Texts longer than this, in characters, are encoded without blocking other threads."""
_BEFORE = "\u9f98"
"""A letter that merges with no other text. To get the ids that a text has after other text, encode it after this letter
and drop the letter's ids."""
_REMEMBERED_TEXTS, _REMEMBERED_CHARS = 4096, 512
"""Maximum number of texts whose ids are cached, and maximum length of a cached text in characters; together a few MB."""


class Codec:
    """Renders messages, encodes and decodes text. Safe to share between episodes and threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a fast tokenizer.

        Args:
            tokenizer: A transformers tokenizer with a `tokenizers` backend; its truncation and padding are switched off.
            chat_template: A Jinja template that replaces the tokenizer's own.
            template_kwargs: Passed to every render, for example {"enable_thinking": False}.

        Raises:
            ConfigError: the tokenizer has no fast backend.
        """
        if not tokenizer.is_fast:
            raise ConfigError(f"{type(tokenizer).__name__} has no fast backend; load the fast tokenizer")
        self.tokenizer: Any = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template = ChatTemplate(tokenizer, chat_template, template_kwargs)
        """Writes messages as text."""
        self.chat_template = self.template.source
        self.template_kwargs = self.template.kwargs
        self._plain = _without_added_tokens(self._backend)
        self._remembered: dict[str, Ids] = {}
        """Short text -> its ids."""
        # Some code models have runs of white space as added tokens. These are ordinary text, not control tokens.
        added = {int(i): str(t) for i, t in tokenizer.added_tokens_decoder.items() if str(t).strip()}
        self.control_tokens: Mapping[int, str] = added
        """id -> text of every token that only templates and the model may write."""
        self._is_control: NDArray[np.bool_] = np.zeros(max(self.vocab_size, 1), np.bool_)
        self._is_control[list(added)] = True
        # A regular expression takes the first matching alternative, and one control text may begin with another.
        longest_first = sorted(added.values(), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._control_ids = {text: i for i, text in added.items()}
        self._normal_ids: dict[str, int] = {}
        """Control text in the tokenizer's normal form -> id, for tokens that the tokenizer looks for after normalisation."""
        if self._backend.normalizer is not None:
            tokens = tokenizer.added_tokens_decoder
            self._normal_ids = {self._normalized(text): i for i, text in added.items() if tokens[i].normalized}
        normal = sorted({*self._normal_ids, *(added.values() if self._normal_ids else ())}, key=len, reverse=True)
        self._normal_text = re.compile("|".join(map(re.escape, normal))) if normal else None
        self._normal_ids = {**self._control_ids, **self._normal_ids}

    # Properties of the tokenizer and the template.

    @property
    def vocab_size(self) -> int:
        """The number of ids, including added tokens; the model's embedding may be padded beyond it."""
        return max(len(self.tokenizer), 1 + max(self.tokenizer.added_tokens_decoder, default=-1))

    @functools.cached_property
    def turn_ends(self) -> TurnEnds:
        """The tokens with which the template ends an assistant turn.

        They may differ between a turn with text and one with calls, and between the last turn and a past one.
        """
        return find_turn_ends(self)

    @functools.cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant turn: first those that the template writes, then the tokenizer's end-of-sequence
        token.

        If the template writes nothing after an assistant turn (GLM), the token that opens the next turn is a stop token.
        """
        eos = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys([*self.turn_ends.stops, *([] if eos is None else [int(eos)])]))

    @functools.cached_property
    def delimiters(self) -> frozenset[int]:
        """The control tokens that open or close turns, roles and media."""
        return find_delimiters(self)

    @functools.cached_property
    def call_tags(self) -> frozenset[int]:
        """The control tokens that the template writes only around calls."""
        return find_call_tags(self)

    @property
    def special_ids(self) -> frozenset[int]:
        """The begin, end and padding tokens of the tokenizer."""
        named = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        return frozenset(int(i) for i in named if i is not None)

    @functools.cached_property
    def generation_prompt(self) -> str:
        """The template text that opens an assistant turn; "" if the template writes none."""
        user = [Message(role="user", content="Hi")]
        closed = self.template.render(user)
        opened = self.template.render(user, add_generation_prompt=True)
        common = common_length(closed, opened)
        # The closed render may end with an end-of-sequence token whose text begins like the generation prompt. The common
        # prefix then ends inside a control token, and the generation prompt begins where that token begins.
        inside = [s.start for s in self.control_spans(opened) if s.start < common < s.end]
        return opened[inside[0] if inside else common :]

    @functools.cached_property
    def opens_as_prompted(self) -> bool:
        """Whether the template begins a past assistant turn with the text of the generation prompt."""
        user = Message(role="user", content="Hi")
        opened = self.template.try_render([user], add_generation_prompt=True)
        past = self.template.try_render([user, Message(role="assistant", content="Hello")])
        return opened is not None and past is not None and past.startswith(opened)

    @functools.cached_property
    def read_words(self) -> tuple[str, ...]:
        """The words in contents that change how the template writes them (`tokens/read_words.py`)."""
        return find_read_words(self)

    @functools.cached_property
    def literals(self) -> frozenset[str]:
        """The string literals of the template, with which it compares roles, types and names."""
        return frozenset(string_literals(self.chat_template or ""))

    @functools.cached_property
    def prompted_reasoning(self) -> str:
        """The reasoning in the generation prompt: "<think>\n" or "<think>\n\n</think>\n\n"; often ""."""
        prompt = self.generation_prompt
        return prompt[prompt.rfind("<think>") :] if "<think>" in prompt else ""

    @functools.cached_property
    def opened_reasoning(self) -> str:
        """The opening of reasoning that the generation prompt writes but a history omits, such as "<think>\n"; often ""."""
        opened = self.prompted_reasoning
        return "" if self.opens_as_prompted or "</think>" in opened else opened

    @functools.cached_property
    def fingerprint(self) -> str:
        """A stable hash of the tokenizer, the template and its arguments. Codecs with equal fingerprints give equal messages
        equal ids."""
        parts = [
            self._backend.to_str(),
            self.chat_template or "",
            json.dumps(self.template_kwargs, sort_keys=True, default=str),
        ]
        return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:16]

    # Text to ids and back.

    def encode(self, text: str) -> Ids:
        """Encode template text: control tokens are recognised, and no begin or end token is added.

        Short texts are cached, because environments often repeat them.
        """
        if len(text) > _REMEMBERED_CHARS:
            return _encode(self._backend, text)
        ids = self._remembered.get(text)
        if ids is None:
            if len(self._remembered) >= _REMEMBERED_TEXTS:
                self._remembered.clear()
            ids = self._remembered[text] = _encode(self._backend, text)
        return ids

    def encode_plain(self, text: str) -> Ids:
        """Encode environment text without control tokens, even if it contains their text; decoding restores the text."""
        ids = _encode(self._plain, text)
        if not self._is_control[ids].any():
            return ids
        # Some vocabularies (Gemma's) contain control text as a normal token too, so the encoder can still return a control
        # token. Cut each control text after its first character: a token cannot span the cut.
        cuts = [0, *(m.start() + 1 for m in self._control_text.finditer(text)), len(text)]
        parts = self._encode_parts([text[start:end] for start, end in itertools.pairwise(cuts)])
        if any(self._is_control[p].any() for p in parts):
            parts = self._encode_parts(list(text))
        return _join(parts)

    @functools.cached_property
    def longest_token(self) -> int:
        """Length of the longest token, in characters."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def _encode_parts(self, parts: Sequence[str]) -> list[Ids]:
        """Encode consecutive parts of an ordinary text separately, without a space that the tokenizer adds before each."""
        if not self._adds_space:
            return [_encode(self._plain, part) for part in parts]
        num_before = len(_encode(self._plain, _BEFORE))
        later = [_encode(self._plain, _BEFORE + part)[num_before:] for part in parts[1:]]
        return [_encode(self._plain, parts[0]), *later]

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the span (start, end) of each token of an environment text, in characters; tokens may share a character."""
        spans: list[tuple[int, int]] = self._plain.encode(
            text.encode("utf-8", "replace").decode(), add_special_tokens=False
        ).offsets
        return spans

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; ids outside the vocabulary are skipped."""
        listed = ids.tolist() if isinstance(ids, np.ndarray) else [int(i) for i in ids]
        return self._backend.decode(listed, skip_special_tokens=skip_special_tokens)

    def decode_turn(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of a completion without its final stop token; the text of other control tokens is kept."""
        ends = len(ids) > 0 and int(ids[-1]) in self.stop_token_ids
        return self.decode(ids[:-1] if ends else ids)

    # Environment text inside template text.

    def control_in(self, ids: Ids) -> Ids:
        """Return the control tokens among `ids`, in order."""
        return ids[self._is_control[ids]]

    def has_control(self, text: str) -> bool:
        """Return whether `text` contains the text of a control token."""
        return self._control_text.search(text) is not None

    @property
    def normalizes_control(self) -> bool:
        """Whether the tokenizer normalises text before it looks for control tokens, so that they have many spellings."""
        return self._normal_text is not None

    def control_spans(self, text: str) -> list[ControlSpan]:
        """Return the positions of the control tokens' texts in `text`."""
        return [ControlSpan(m.start(), m.end(), self._control_ids[m[0]]) for m in self._control_text.finditer(text)]

    def replace_control(self, text: str, change: Callable[[str], str], *, barred: Collection[int]) -> str:
        """Apply `change` to each piece of a text that is the text of a control token in `barred`.

        If only the normalised text contains such a token, `change` is applied to the whole text.
        """
        if self._is_disguised(text, barred):
            return change(text)
        return self._control_text.sub(lambda m: change(m[0]) if self._control_ids[m[0]] in barred else m[0], text)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], *, last_id: int | None = None) -> Ids:
        """Encode consecutive pieces of one text that follows the token `last_id`.

        A piece is (text, is_plain); with is_plain, all of its text is ordinary text. Some tokenizers put a space before
        every text that they encode. No space is added between two pieces: a piece gets the ids that it has after other text.
        """
        parts: list[Ids] = []
        for text, is_plain in pieces:
            if not text:
                continue
            if self._adds_space and last_id is not None and not (self._is_control[last_id] and self._opens_with_space):
                ids = self._encode_behind(text, is_plain=is_plain)
            else:
                ids = self.encode_plain(text) if is_plain else self.encode(text)
            parts.append(ids)
            last_id = int(ids[-1]) if len(ids) else last_id
        return parts[0] if len(parts) == 1 else _join(parts)

    def _encode_behind(self, text: str, *, is_plain: bool) -> Ids:
        encode = self.encode_plain if is_plain else self.encode
        before, whole = encode(_BEFORE), encode(_BEFORE + text)
        return whole[len(before) :] if np.array_equal(whole[: len(before)], before) else encode(text)

    @functools.cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as SentencePiece tokenizers do."""
        return self.decode(np.tile(self.encode_plain("a"), 2)) != "aa"

    @functools.cached_property
    def _opens_with_space(self) -> bool:
        """Whether the tokenizer also puts a space before a text that follows a control token."""
        control, letter = next(iter(self.control_tokens.items()), (None, ""))
        return control is None or len(self.encode(letter + "a")) == 1 + len(self.encode("a"))

    def _is_disguised(self, text: str, barred: Collection[int]) -> bool:
        """Return whether normalising a text produces control tokens of `barred` that the text itself does not have."""
        if self._normal_text is None:
            return False
        pieces = map(self._normalized, self._control_text.split(text))
        return any(self._normal_ids[m[0]] in barred for piece in pieces for m in self._normal_text.finditer(piece))

    def _normalized(self, text: str) -> str:
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text.encode("utf-8", "replace").decode()))


def load_codec(
    path: str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Codec:
    """Load the tokenizer at `path` (a folder, or a name on the hub).

    Args:
        path: A folder with tokenizer.json, or a hub name.
        revision: Branch, tag or commit on the hub.
        chat_template: A Jinja template, or the path of a `.jinja` file; replaces the tokenizer's own.
        template_kwargs: Passed to every render.

    Raises:
        ConfigError: there is no tokenizer at `path`, or the template file does not exist.
    """
    from pathlib import Path

    from transformers import AutoTokenizer

    if chat_template is not None and "\n" not in chat_template and chat_template.endswith(".jinja"):
        try:
            chat_template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"the chat template {chat_template!r} cannot be read ({one_line(problem)})") from problem
    cached = only_cached(path, revision=revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, local_files_only=cached, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise ConfigError(_no_tokenizer(path, problem)) from problem
    return Codec(tokenizer, chat_template=chat_template, template_kwargs=template_kwargs)


def _no_tokenizer(path: str, problem: Exception) -> str:
    """Explain why no tokenizer was loaded: no such folder, an empty folder, no network, or the library's error."""
    from pathlib import Path

    if Path(path).is_dir():
        if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return f"the folder {path!r} holds no tokenizer (tokenizer.json); name the folder of a model or a tokenizer"
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        return f"there is no folder {path!r}; name the folder of a model or a tokenizer, or one on the hub as owner/name"
    return f"there is no usable tokenizer at {path!r} ({one_line(problem)}); give a folder with one or a hub name"


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the same model but without added tokens; it shares the vocabulary."""
    from tokenizers import Tokenizer

    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _encode(backend: Tokenizer, text: str) -> Ids:
    try:
        if len(text) > LONG_CHARS:  # only a batch call lets other threads run
            return ids_array(backend.encode_batch([text], add_special_tokens=False)[0].ids)
        return ids_array(backend.encode(text, add_special_tokens=False).ids)
    except (TypeError, UnicodeEncodeError):
        # JSON can contain lone surrogates, which cannot be encoded as UTF-8; they become question marks.
        return ids_array(backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids)


def _join(parts: Sequence[Ids]) -> Ids:
    return ids_array(np.concatenate(parts) if parts else np.empty(0, np.int32))
