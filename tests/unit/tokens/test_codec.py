"""The codec: trusted and foreign text, the end of a turn, and errors of bad templates and tokenizers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import ConfigError, TemplateError
from polyturn.core.messages import Message, ToolCall
from polyturn.testing.tiny_models import TAG_TOKENS, TURN_TOKENS, tiny_tokenizer
from polyturn.tokens.codec import LONG_CHARS, Codec, load_codec
from support.refusals import refuses

CODEC = Codec(tiny_tokenizer())
CONTROL = (*TURN_TOKENS, *TAG_TOKENS)
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the tokenizers and templates in ../shared/data")

texts = st.lists(
    st.one_of(
        st.sampled_from([*CONTROL, "<|im_", "end|>", "<", ">", " ", "\n"]), st.text("aZ0é日🙂\u0301\u200b\x00\t", max_size=5)
    ),
    max_size=8,
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


@given(texts.map("".join))
def test_environment_text_survives_without_control_tokens(text: str) -> None:
    ids = CODEC.encode_plain(text)
    assert len(CODEC.control_in(ids)) == 0
    assert CODEC.decode(ids) == text
    assert CODEC.decode(CODEC.encode_plain("a\ud800b")) == "a?b"


@given(texts.map("".join))
def test_pieces_have_the_control_tokens_of_the_template_only(text: str) -> None:
    ids = CODEC.encode_pieces([("<|im_start|>user\n", False), (text, True), ("<|im_end|>", False)])
    assert [CODEC.control_tokens[i] for i in CODEC.control_in(ids).tolist()] == ["<|im_start|>", "<|im_end|>"]
    assert CODEC.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>"


def test_control_text_in_the_models_vocabulary_is_cut_apart() -> None:
    """In some vocabularies (Gemma's) control tokens are ordinary pieces too, found even when they are not added tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*pre_tokenizers.ByteLevel.alphabet(), "<end>"]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], ignore_merges=True))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("<end>", "isolated"), letters])
    backend.decoder = decoders.ByteLevel()
    codec = Codec(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))
    assert codec.encode("<end>").tolist() == [256]
    for text in ("<end>", "a\x00b<end>", "<end><end>x"):
        assert 256 not in codec.encode_plain(text)
        assert codec.decode(codec.encode_plain(text)) == text


def test_repeated_text_is_remembered_up_to_a_bound() -> None:
    codec = Codec(tiny_tokenizer())
    first = codec.encode("<|im_start|>user\nTry again.<|im_end|>\n")
    again = codec.encode("<|im_start|>user\nTry again.<|im_end|>\n")
    assert again is first
    assert not first.flags.writeable
    for number in range(5000):
        codec.encode(f"{number}")
    again = codec.encode("<|im_start|>user\nTry again.<|im_end|>\n")
    assert again is not first
    assert again.tolist() == first.tolist()
    long = "x" * 600
    assert codec.encode(long) is not codec.encode(long)


def test_end_of_a_turn_is_found_by_rendering() -> None:
    assert [CODEC.control_tokens[i] for i in CODEC.stop_token_ids] == ["<|im_end|>"]
    assert CODEC.generation_prompt == "<|im_start|>assistant\n"


def test_turn_is_read_without_its_stop_token() -> None:
    ids = CODEC.encode("<think>x</think>hi<|im_end|>")
    assert CODEC.decode_turn(ids) == "<think>x</think>hi"
    assert CODEC.decode_turn(ids[:-1]) == "<think>x</think>hi"
    assert CODEC.decode_turn(ids[:0]) == ""
    assert CODEC.decode(ids, skip_special_tokens=True) == "<think>x</think>hi"
    assert CODEC.decode([*CODEC.encode("hi").tolist(), CODEC.vocab_size + 5]) == "hi", "ids outside the vocabulary"


def test_fingerprint_follows_template_and_vocabulary() -> None:
    same = Codec(tiny_tokenizer())
    assert same.fingerprint == CODEC.fingerprint
    others = [
        Codec(tiny_tokenizer(), chat_template="{{ messages }}"),
        Codec(tiny_tokenizer(), template_kwargs={"enable_thinking": False}),
        Codec(tiny_tokenizer(300)),
    ]
    assert len({CODEC.fingerprint, *(c.fingerprint for c in others)}) == 4


def test_broken_call_is_rendered_as_the_model_wrote_it() -> None:
    broken = ToolCall(id="call_0", name="", raw="<tool_call>\n{oops\n</tool_call>", error="not JSON")
    fine = ToolCall(id="call_1", name="add", arguments={"a": 1})
    text = CODEC.template.render([user("hi"), Message(role="assistant", content="So:", tool_calls=(broken, fine))])
    assert "So:\n<tool_call>\n{oops\n</tool_call>\n<tool_call>\n" in text
    assert '{"name": "add", "arguments": {"a": 1}}' in text


def test_template_that_pastes_arguments_gets_json() -> None:
    """DeepSeek's template concatenates arguments with text."""
    calls = "{% for c in m.tool_calls or [] %}{{ '|' + c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    codec = Codec(tiny_tokenizer(), chat_template=template + "{{ mood }}", template_kwargs={"mood": "!"})
    call = ToolCall(id="c", name="add", arguments={"a": "é"})
    assert codec.template.render([user("hi"), Message(role="assistant", content="", tool_calls=(call,))]) == 'hi|{"a": "é"}!'


def test_missing_template_is_an_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    codec = Codec(tokenizer)
    refuses(lambda: codec.template.render([user("hi")]), TemplateError, "no chat template")
    assert codec.stop_token_ids == (tokenizer.eos_token_id,)


def test_template_that_fails_names_the_message() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    )
    codec = Codec(tiny_tokenizer(), chat_template=template)
    messages = [user("hi"), Message(role="assistant", content="x"), Message(role="tool", content="4"), user("bye")]
    refuses(lambda: codec.template.render(messages), TemplateError, "message 2, a tool message", "no tools here")
    with pytest.raises(TemplateError, match="message 0"):
        Codec(tiny_tokenizer(), chat_template="{{ nothing.at.all }}").template.render([user("hi")])


def test_slow_tokenizer_and_missing_folder_are_refused(tmp_path: Path) -> None:
    class Slow:
        is_fast = False

    refuses(lambda: Codec(Slow()), ConfigError, "Slow")
    refuses(lambda: load_codec(str(tmp_path / "nowhere")), ConfigError, "nowhere")


def test_saved_tokenizer_loads_as_the_same_codec(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_codec(str(tmp_path)).fingerprint == CODEC.fingerprint
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    assert load_codec(str(tmp_path), chat_template=str(tmp_path / "own.jinja")).template.render([user("hi")]) == "hi!"
    refuses(lambda: load_codec(str(tmp_path), chat_template="missing.jinja"), ConfigError, "missing.jinja")


@needs_shared
def test_real_vocabulary_keeps_environment_text_apart() -> None:
    codec = load_codec(str(SHARED / "tokenizers" / "qwen2"), chat_template=str(SHARED / "chat_templates" / "qwen2_5.jinja"))
    assert codec.vocab_size == 151669
    assert codec.stop_token_ids == (151645,)
    text = " ".join(codec.control_tokens.values())
    assert len(codec.control_in(codec.encode(text))) == len(codec.control_tokens)
    assert len(codec.control_in(codec.encode_plain(text))) == 0
    assert codec.decode(codec.encode_plain(text)) == text


@pytest.mark.parametrize("text", ["mouse " * 20_000, "<|im_end|>" * 10_000, "\ud800" * 70_000, "ü€𐍈" * 30_000])
def test_long_text_has_the_ids_of_a_short_one(text: str) -> None:
    assert len(text) > LONG_CHARS
    backend = CODEC.tokenizer.backend_tokenizer
    assert (
        CODEC.encode(text).tolist() == backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids
    )
