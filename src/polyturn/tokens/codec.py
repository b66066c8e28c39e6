"""Codec: one tokenizer and one chat template, and the only way between text and token ids.

Template text and environment text are encoded differently, because who wrote a control token matters:

    encode("<|im_end|>\\n")        -> [151645, 198]          the template speaks: control tokens are recognised
    encode_plain("<|im_end|>")    -> [27, 91, 318, ...]     a tool's output only looks like one: ordinary text

Control tokens are *all* added tokens, special or not (a tool call's tags are usually not special). In a text that mixes
both, only the control text of the environment is encoded as plain text (`encode_pieces`), so that everything else merges
exactly as in a render of the whole.
"""

from __future__ import annotations

import functools
import hashlib
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
from polyturn.tokens.markers import string_literals
from polyturn.tokens.read_words import find_read_words
from polyturn.tokens.template import ChatTemplate
from polyturn.tokens.turn_ends import ControlSpan, TurnEnds, common_length, find_turn_ends

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

LONG_CHARS = 1 << 16
"""Length of a text from which on it is encoded so that other threads go on meanwhile."""
_BEFORE = "\u9f98"
"""A letter that no token continues, to see what a text becomes behind another."""
_REMEMBERED_TEXTS, _REMEMBERED_CHARS = 4096, 512
"""Number of short texts a codec remembers the ids of, and how long they are at most: a few megabytes."""


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
        """The ids of short texts."""
        # Added runs of white space (some code models have them) are ordinary text: two spaces control nothing.
        added = {int(i): str(t) for i, t in tokenizer.added_tokens_decoder.items() if str(t).strip()}
        self.control_tokens: Mapping[int, str] = added
        """id -> text of every token that only templates and the model may write."""
        self._is_control: NDArray[np.bool_] = np.zeros(max(self.vocab_size, 1), np.bool_)
        self._is_control[list(added)] = True
        # A pattern takes the first alternative that fits, and one control text may begin with another.
        longest_first = sorted(added.values(), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._control_ids = {text: i for i, text in added.items()}
        self._normal_ids: dict[str, int] = {}
        """The texts of control tokens in the tokenizer's normal form, where those are looked for."""
        if self._backend.normalizer is not None:
            tokens = tokenizer.added_tokens_decoder
            self._normal_ids = {self._normalized(text): i for i, text in added.items() if tokens[i].normalized}
        normal = sorted({*self._normal_ids, *(added.values() if self._normal_ids else ())}, key=len, reverse=True)
        self._normal_text = re.compile("|".join(map(re.escape, normal))) if normal else None
        self._normal_ids = {**self._control_ids, **self._normal_ids}

    # What the tokenizer is.

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included; a model's embedding may be padded beyond it."""
        return max(len(self.tokenizer), 1 + max(self.tokenizer.added_tokens_decoder, default=-1))

    @functools.cached_property
    def turn_ends(self) -> TurnEnds:
        """The template's ends of an assistant's turn: with text, with calls, at the end and in a history."""
        return find_turn_ends(self)

    @functools.cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's turn: the template's, then the tokenizer's end-of-sequence token.

        A template that writes nothing behind a turn (GLM) ends it with the token that opens the next one.
        """
        eos = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys([*self.turn_ends.stops, *([] if eos is None else [int(eos)])]))

    @functools.cached_property
    def delimiters(self) -> frozenset[int]:
        """The control tokens that open or close turns, roles and media."""
        return find_delimiters(self)

    @functools.cached_property
    def call_tags(self) -> frozenset[int]:
        """The control tokens that the template writes around calls and nowhere else."""
        return find_call_tags(self)

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that the tokenizer names as begin, end and padding."""
        named = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        return frozenset(int(i) for i in named if i is not None)

    @functools.cached_property
    def generation_prompt(self) -> str:
        """The template text that opens an assistant's turn; "" if the template writes none."""
        user = [Message(role="user", content="Hi")]
        closed = self.template.render(user)
        opened = self.template.render(user, add_generation_prompt=True)
        common = common_length(closed, opened)
        # What closes a document (an end-of-sequence token) may begin as the prompt does.
        inside = [s.start for s in self.control_spans(opened) if s.start < common < s.end]
        return opened[inside[0] if inside else common :]

    @functools.cached_property
    def opens_as_prompted(self) -> bool:
        """Whether a history's turns begin with the text of the generation prompt."""
        user = Message(role="user", content="Hi")
        opened = self.template.try_render([user], add_generation_prompt=True)
        past = self.template.try_render([user, Message(role="assistant", content="Hello")])
        return opened is not None and past is not None and past.startswith(opened)

    @functools.cached_property
    def read_words(self) -> tuple[str, ...]:
        """The words that the template looks for in contents, which it then writes otherwise."""
        return find_read_words(self)

    @functools.cached_property
    def literals(self) -> frozenset[str]:
        """The strings in the template's code: what it compares roles, types and names with."""
        return frozenset(string_literals(self.chat_template or ""))

    @functools.cached_property
    def opened_reasoning(self) -> str:
        """The part of a turn's reasoning that the generation prompt writes and a history omits, as "<think>\n"; often ""."""
        prompt = self.generation_prompt
        opened = prompt[prompt.rfind("<think>") :] if "<think>" in prompt else ""
        return "" if self.opens_as_prompted or "</think>" in opened else opened

    @functools.cached_property
    def fingerprint(self) -> str:
        """A stable hash of vocabulary, merges, template and template arguments: equal ids for equal messages."""
        parts = [
            self._backend.to_str(),
            self.chat_template or "",
            json.dumps(self.template_kwargs, sort_keys=True, default=str),
        ]
        return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:16]

    # Text to ids and back.

    def encode(self, text: str) -> Ids:
        """Return the ids of template text: control tokens are recognised, none is added.

        Short texts are remembered, because environments say the same again and again.
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
        """Return the ids of environment text: never a control token, whatever the text says; decoding gives the text."""
        ids = _encode(self._plain, text)
        if not self._is_control[ids].any():
            return ids
        # The model's own vocabulary holds the control text (Gemma's does), so it is cut where no token can span it.
        cut = self._control_text.sub(lambda m: m[0][0] + "\x00" + m[0][1:], text)
        parts = self._encode_parts(cut.split("\x00"))
        if any(self._is_control[p].any() for p in parts):
            parts = self._encode_parts(list(text))
        return _join(parts)

    @functools.cached_property
    def longest_token(self) -> int:
        """Number of characters that one token stands for at most."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def _encode_parts(self, parts: Sequence[str]) -> list[Ids]:
        """Return the ids of the parts of one ordinary text."""
        if not self._adds_space:
            return [_encode(self._plain, part) for part in parts]
        num_before = len(_encode(self._plain, _BEFORE))
        behind = [_encode(self._plain, _BEFORE + part)[num_before:] for part in parts[1:]]
        return [_encode(self._plain, parts[0]), *behind]

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each token of environment text, in characters; a character may have several."""
        spans: list[tuple[int, int]] = self._plain.encode(
            text.encode("utf-8", "replace").decode(), add_special_tokens=False
        ).offsets
        return spans

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; an id outside the vocabulary reads as nothing."""
        listed = ids.tolist() if isinstance(ids, np.ndarray) else [int(i) for i in ids]
        return self._backend.decode(listed, skip_special_tokens=skip_special_tokens)

    def decode_turn(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of a completion without the stop token that ends it; control tokens inside it are kept."""
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
        """Whether control tokens are looked for in the tokenizer's normal form of a text, which has many spellings."""
        return self._normal_text is not None

    def control_spans(self, text: str) -> list[ControlSpan]:
        """Return the positions of the control tokens' texts in `text`."""
        return [ControlSpan(m.start(), m.end(), self._control_ids[m[0]]) for m in self._control_text.finditer(text)]

    def replace_control(self, text: str, change: Callable[[str], str], *, barred: Collection[int]) -> str:
        """Return a text with `change` applied to each piece that reads like a control token of `barred`; to all of it where
        only the tokenizer's normal form of the text reads so."""
        if self._is_disguised(text, barred):
            return change(text)
        return self._control_text.sub(lambda m: change(m[0]) if self._control_ids[m[0]] in barred else m[0], text)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], *, last_id: int | None = None) -> Ids:
        """Return the ids of texts that follow one another, each with whether it is ordinary text throughout.

        A tokenizer that puts a space before a text that it is given puts none inside of one: where a piece goes on behind
        ordinary text, its ids are those that it has there.
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
        """Whether the tokenizer puts a space before a text, as SentencePiece's do."""
        return self.decode(np.tile(self.encode_plain("a"), 2)) != "aa"

    @functools.cached_property
    def _opens_with_space(self) -> bool:
        """Whether it does so behind a control token as well."""
        control, letter = next(iter(self.control_tokens.items()), (None, ""))
        return control is None or len(self.encode(letter + "a")) == 1 + len(self.encode("a"))

    def _is_disguised(self, text: str, barred: Collection[int]) -> bool:
        """Return whether the tokenizer's normal form of a text has control tokens of `barred` that the text has not."""
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
        ConfigError: there is no tokenizer there, or no such template file.
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
    """Return why there is no tokenizer: no such folder, nothing in it, no network, or what the library says."""
    from pathlib import Path

    if Path(path).is_dir():
        if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return f"the folder {path!r} holds no tokenizer (tokenizer.json); name the folder of a model or a tokenizer"
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        return f"there is no folder {path!r}; name the folder of a model or a tokenizer, or one on the hub as owner/name"
    return f"there is no usable tokenizer at {path!r} ({one_line(problem)}); give a folder with one or a hub name"


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer over the same model that knows no added tokens; the vocabulary is shared, not copied."""
    from tokenizers import Tokenizer

    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _encode(backend: Tokenizer, text: str) -> Ids:
    try:
        if len(text) > LONG_CHARS:  # only a batch lets other threads go on
            return ids_array(backend.encode_batch([text], add_special_tokens=False)[0].ids)
        return ids_array(backend.encode(text, add_special_tokens=False).ids)
    except (TypeError, UnicodeEncodeError):
        # A lone surrogate, which JSON can spell, is not Unicode text; it becomes a question mark.
        return ids_array(backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids)


def _join(parts: Sequence[Ids]) -> Ids:
    return ids_array(np.concatenate(parts) if parts else np.empty(0, np.int32))
