"""Reading a text of a model or an environment takes time linear in its length, even if it leaves brackets or tags open."""

import sys

import numpy as np
import pytest

from polyturn.compat.swift.schedulers import OpenEnvScheduler
from polyturn.core.secrets import hide
from polyturn.engines.text_codec import read_chat, text_codec
from polyturn.environments.gymnasium import uncoloured
from polyturn.partners.judge import read_verdict
from polyturn.rewards.math import is_near
from support.refusals import refuses

SIZE = 1 << 20


def verdict(text):
    refuses(lambda: read_verdict(text, low=0, high=1), ValueError, "is not JSON")


def action(text):
    return OpenEnvScheduler().parse_action(text)


def message(text):
    """Return an assistant's text as a chat API gets it, and its calls."""
    codec = text_codec()
    ids = [codec.encode("<|im_start|>assistant\n"), codec.encode(text), codec.encode("<|im_end|>")]
    return read_chat(np.concatenate(ids))[0][0]["content"]


HOSTILE = {
    "blank behind a fence": (action, "```\n" + " " * SIZE + "x"),
    "lines behind a fence": (action, "```" + "\n" * SIZE + "x"),
    "blanks before text": (action, "```\n" + ("x" + "\n " * 20) * (SIZE // 41) + "x"),
    "calls that nobody closes": (message, "<tool_call>\n" * (SIZE // 12)),
    "colours that nobody ends": (uncoloured, "\x1b[41m" * (SIZE // 5)),
    "a line drawn with dashes": (hide, "-" * SIZE),
    "flags without end": (hide, "--token" * (SIZE // 7)),
    "names of flags in an address": (hide, "x://" + "-a" * (SIZE // 2)),
    "digits of an answer": (lambda text: is_near(text, "5"), "0" * SIZE),
    "lines behind a judge's fence": (verdict, "```" + "\n" * SIZE + "x"),
    "blanks behind a judge's fence": (verdict, "```json" + " " * SIZE + "x```"),
    "fences of a judge": (verdict, "```\n" * (SIZE // 4) + "x"),
}


@pytest.mark.parametrize(("read", "text"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_of_a_megabyte_is_read_in_linear_time(read, text):
    """A reader that restarts at each position takes quadratic time, and the test would time out."""
    assert sys.getsizeof(read(text)) < 2 * SIZE


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("```json\n{}\n```", "{}"),
        ("  ```\n\n  a\n\nb\n \n```  ", "  a\n\nb"),
        ("```\n```", ""),
        ("```a```", "```a```"),
        ("```a b\n```", "```a b\n```"),
        ("a", "a"),
        ("`````", "`````"),
    ],
)
def test_fences_are_taken_off(text, inside):
    assert action(text) == ({} if inside == "{}" else {"message": inside})


def test_colours_become_brackets():
    assert uncoloured("\x1b[41mS\x1b[0mFF\x1b[34mx\x1b[0m\x1b[35my\x1b[0m\x1b[1mz\x1b[0m\x1b[41mend") == "[S]FF(x){y}zend"
