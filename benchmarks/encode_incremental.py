"""Compares incremental encoding with rendering and encoding the whole conversation at every turn. Prints one JSON line.

    python benchmarks/encode_incremental.py [--turns 50] [--tokens 32000] [--repeats 9]

The conversation has 50 turns and ends at 32,000 tokens; every other turn calls a tool. The incremental way encodes the
prompt once and then the answer to each turn; the usual way renders and encodes the whole conversation before each turn.
Nothing is sampled. Figures are CPU seconds of one thread, with warm encoders as in a second episode. `same_ids` is whether
both give the same ids (impossible for templates that end a turn differently in a history). The templates are three of
tests/data/templates with a small tokenizer, and, if available, Llama 3.1, gpt-oss and Qwen 2.5 with Qwen's vocabulary.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from polyturn.core.arrays import Ids
from polyturn.core.messages import Message, ToolCall
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.delta import DeltaEncoder
from support.dialogues import TOOLS, Dialogue, DialogueTurn
from support.template_case import TemplateCase, load_subjects

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
WRITTEN = ("chatml", "dated_headers", "other_end")
PUBLISHED = ("qwen2_5", "llama3_1", "gptoss")
TARGET = 20.0
SENTENCE = "Anna has 12 apples and gives 5 of them to Ben, who pays 3 coins for each and keeps the rest for later. "


def conversation(subject: TemplateCase, turns: int, tokens: int) -> Dialogue:
    """Return a conversation of about `tokens` tokens that ends with the generation prompt after the last answer."""
    each = tokens // turns
    words = SENTENCE * max(1, round(each * 0.49 / len(subject.codec.encode(SENTENCE))))
    spoken = []
    for turn in range(turns):
        if turn % 2:
            message, heard = Message(role="assistant", content=words.strip()), Message(role="user", content=words.strip())
        else:
            call = ToolCall(id=f"call{turn:05d}", name="look_up", arguments={"query": words.strip()})
            message = Message(role="assistant", content="", tool_calls=(call,))
            heard = Message(role="tool", content=words.strip(), tool_call_id=call.id, name=call.name)
        spoken.append(DialogueTurn(message=message, answer=(heard,)))
    return Dialogue(
        kind="long", seed=0, prompt=(Message(role="user", content="What is it?"),), turns=tuple(spoken), tools=TOOLS
    )


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median CPU time of `run`."""
    out = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        out.append(time.process_time() - began)
    return median(out)


def measure(subject: TemplateCase, *, turns: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Return the two times and their ratio for one template."""
    codec, oracle = subject.codec, subject.oracle
    dialogue = conversation(subject, turns, tokens)
    sampled = [codec.encode(oracle.says(dialogue, turn)) for turn in range(turns)]
    encoder = DeltaEncoder(codec, tools=TOOLS)

    def incremental() -> list[Ids]:
        prompt = encoder.start(dialogue.prompt)
        return [
            prompt,
            *(encoder.extend(t.answer, last_id=int(s[-1])) for t, s in zip(dialogue.turns, sampled, strict=True)),
        ]

    def whole() -> list[int]:
        return [oracle.ids(oracle.render(dialogue.before(turn), TOOLS, prompt=True)) for turn in range(turns + 1)][-1]

    prompt, *heard = incremental()
    history = [*prompt, *(i for pair in zip(sampled, heard, strict=True) for ids in pair for i in ids.tolist())]
    whole_ids = whole()
    slow, fast = seconds(whole, max(1, repeats // 3)), seconds(incremental, repeats)
    return {
        "template": subject.name,
        "tokens": len(whole_ids),
        "same_ids": history == whole_ids,
        "incremental_ms": round(1000 * fast, 1),
        "whole_ms": round(1000 * slow, 1),
        "ratio": round(slow / fast, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args(arguments)
    facts = yaml.safe_load((ROOT / "tests/data/templates/facts.yaml").read_text())
    subjects = load_subjects(ROOT / "tests/data/templates", facts["hand_written"], tiny_tokenizer(8192), only=WRITTEN)
    if SHARED.exists():
        from transformers import AutoTokenizer

        qwen = AutoTokenizer.from_pretrained(str(SHARED / "tokenizers" / "qwen2"))
        subjects += load_subjects(SHARED / "chat_templates", facts["published"], qwen, only=PUBLISHED)
    rows = [measure(s, turns=chosen.turns, tokens=chosen.tokens, repeats=chosen.repeats) for s in subjects]
    for row in rows:
        print(row)
    smallest = min(row["ratio"] for row in rows)
    print(
        json.dumps(
            {
                "benchmark": "encode_incremental",
                "turns": chosen.turns,
                "templates": rows,
                "smallest_ratio": smallest,
                "target": TARGET,
                "passed": smallest >= TARGET,
            }
        )
    )


if __name__ == "__main__":
    main()
