"""Runs for tests of the viewer: three steps of real episodes with a scripted model, one of them hostile, and metrics."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.schema import Trained
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tools.gsm8k import Gsm8kTool

CALL = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "8"}}\n</tool_call>'
PAGES = {
    "runs": "tbody tr",
    "curves": ".chart canvas",
    "trajectories": "tbody tr",
    "distributions": ".heat-map rect",
    "groups": "tbody tr",
    "timeline?step=2&split=train": "svg g",
    "about": "pre",
    "about?with=1": "section table",
    "one?id=g30/1&step=3&split=train": ".tokens span",
    "why?id=g30/0&step=3&split=train": ".formula",
    "task?task_id=t0&split=train": ".message",
    "compare?a=g30/0&as=3&al=train&b=g31/0&bs=3&bl=train": ".sides ins",
    "answer": ".said",
}
"""Where the pages of a run of `write_run` are -> an element that is there when they are."""
HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\x1b[31mred\x1b[0m \u202eright to left "


def write_run(folder: Path) -> None:
    """Write three steps of real episodes with a scripted model, one of them hostile, and metrics."""
    says = [CALL, "#### 8", "#### 4"]
    context = scripted_context(says, tools=[Gsm8kTool({})], interactions={"gsm8k": Gsm8kInteraction({})})
    with ParquetStore(folder) as store:
        for step in (1, 2, 3):
            specs = [
                GroupSpec(id=f"g{step}{i}", task=task(f"What is 2+2 ({i})?", id=f"t{i}", interaction="gsm8k"), size=2)
                for i in range(3)
            ]
            for group in asyncio.run(RolloutPool(context).run(specs)):
                trained = {t.id: made(t.num_sampled_tokens) for t in group.trajectories[:1]}
                trained |= {t.id: Trained(dropped="zero_variance") for t in group.trajectories[1:]}
                store.add(group, step=step, split="train", trained=trained)
            store.flush()
        if folder.name == "first":
            store.add(hostile_group(), step=3, split="eval/hostile")
    lines = [
        {"step": s, "reward/mean": 0.1 * s, "eval/greedy/success": 0.2 * s, "rollout/turns": 3 - 0.1 * s} for s in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("name: <b>run</b>\nalgorithm: {advantage: {name: grpo}}\n")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")


def leave_a_question(desk: Path) -> None:
    """Let a conversation wait at a desk for an hour."""
    talk = [{"role": "user", "content": "I need a table."}, {"role": "assistant", "content": f"For how many? {HOSTILE}"}]
    times = {"since": time.time(), "until": time.time() + 3600}
    paper = {"ticket": "f" * 32, "about": {"conversation": "g0/0", "goal": "Eat."}, "messages": talk, **times}
    (desk / "waiting" / f"{paper['ticket']}.json").write_text(json.dumps(paper))


def made(count: int) -> Trained:
    policy_logprobs = np.full(count, -0.5, np.float32)
    return Trained(
        advantages=np.linspace(-1, 1, count), policy_logprobs=policy_logprobs, entropies=np.linspace(0, 2, count, dtype="f4")
    )


def hostile_group() -> TrajectoryGroup:
    long = HOSTILE * (500_000 // len(HOSTILE))
    hostile = task(long, id="<b>t</b>", data_source="<i>x</i>", ground_truth="4")
    context = scripted_context([HOSTILE], rewards={"<i>x</i>": lambda trajectory: 1.0})
    spec = GroupSpec(id="<u>evil</u>", task=hostile, size=1)
    (group,) = asyncio.run(RolloutPool(context).run([spec]))
    return group


def until(page: Any, expression: str) -> None:
    """Wait until an expression holds in a page; playwright's own way evaluates text, which the pages' policy forbids."""
    for _ in range(9000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"{expression} did not come true")


MARKDOWN = """# The plan
Look **both** up, then `add`: [docs](https://example.org/a) ![a picture](https://example.org/leak.png)
- first *this*
  - then <b>that</b>
1. and [a trap](javascript:window.pwned=3)

| city | people |
|---|---:|
| Bonn | 336465 |

```python
def add(a, b):  # "sum"
    return a + b
```
> quoted
![dot](data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==)
![x](data:image/svg+xml;base64,PHN2Zy8+)
\x1b[31mred\x1b[0m \u202eright to left"""


def write_rich_run(folder: Path) -> None:
    """Write a run whose conversations have Markdown, code and JSON."""
    with ParquetStore(folder) as store:
        for number, says in enumerate(([CALL, MARKDOWN, "#### 8"], [MARKDOWN, CALL, "#### 8"])):
            context = scripted_context(says, tools=[Gsm8kTool({})], interactions={"gsm8k": Gsm8kInteraction({})})
            spec = GroupSpec(id=f"g{number}", task=task("What is 2+2?", id="t0", interaction="gsm8k"), size=2)
            (group,) = asyncio.run(RolloutPool(context).run([spec]))
            trained = {t.id: made(t.num_sampled_tokens) for t in group.trajectories}
            store.add(group, step=number + 1, split="train", trained=trained)
    lines = [{"step": s, "reward/mean": s / 60} for s in range(1, 61)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("name: rich\nalgorithm: {advantage: {name: grpo}}\n")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
