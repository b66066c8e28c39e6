"""Prepare published problem sets: write the parquet files that a multi-turn run reads.

    prepare_gsm8k(Path("gsm8k"), variant="interaction", out=Path("data"))  ->  [data/train.parquet, data/test.parquet]

Separate from the readers: this runs once, by hand (`polyturn data gsm8k`). The columns are the documented ones
(data_source, prompt, ability, reward_model, extra_info), so that the files also serve programs that expect those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.core.errors import ConfigError, DataError, did_you_mean, one_line
from polyturn.tokens.hub import unreachable

GSM8K = "openai/gsm8k"
"""The data source of the rows, and the dataset's name on the hub."""

_SYSTEM = {
    "tool": (
        "You solve mathematics problems with great care. Work through the problem in steps. Before you give your final "
        "answer you must check it by calling the tool `calc_gsm8k_reward` at least once, and you may correct yourself "
        "after you have read its result. End with your final answer in the form `#### <answer>`."
    ),
    "interaction": (
        "You solve mathematics problems with great care. Work through the problem in steps. When the user tells you that "
        "your answer is wrong, look for the mistake and think the problem through again. End every reply with your final "
        "answer in the form `#### <answer>`."
    ),
}
_INSTRUCTION = "Let's think step by step and output the final answer after `####`."


def prepare_gsm8k(
    folder: Path | None,
    *,
    variant: Literal["tool", "interaction"],
    out: Path,
    system: str | None = None,
    instruction: str | None = None,
) -> list[Path]:
    """Write GSM8K as `train.parquet` and `test.parquet`.

    Args:
        folder: Holds OpenAI's `train.jsonl` and `test.jsonl`; None fetches the dataset from the hub.
        variant: "tool" for rows that call `calc_gsm8k_reward`, "interaction" for rows that talk to `gsm8k`.
        out: The folder to write to; it is made.
        system: The system prompt; None is that of the variant.
        instruction: What is asked behind every question; None asks for the answer after `####`.

    Returns:
        The files written.

    Raises:
        ConfigError: the variant is unknown.
        DataError: a file is missing, a line is not a problem, or the hub cannot be reached.
    """
    if variant not in _SYSTEM:
        raise ConfigError(f"there is no gsm8k variant {variant!r}.{did_you_mean(variant, _SYSTEM)}")
    out.mkdir(parents=True, exist_ok=True)
    said = _Wording(_SYSTEM[variant] if system is None else system, _INSTRUCTION if instruction is None else instruction)
    written = []
    for split in ("train", "test"):
        problems = _from_hub(split) if folder is None else _from_jsonl(folder / f"{split}.jsonl")
        rows = [_row(p, index=i, split=split, variant=variant, said=said) for i, p in enumerate(problems)]
        path = out / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        written.append(path)
    return written


def final_answer(answer: str) -> str:
    """Return what follows the last `####` of a worked answer, without commas: "… #### 1,250" -> "1250".

    Raises:
        DataError: there is no such mark, or nothing after it.
    """
    _, mark, after = answer.rpartition("####")
    value = after.strip().replace(",", "")
    if not mark or not value:
        raise DataError(f"the answer must end in '#### <number>'; this one ends in {answer[-40:]!r}")
    return value


class _Wording(NamedTuple):
    system: str
    instruction: str


def _row(problem: dict[str, Any], *, index: int, split: str, variant: str, said: _Wording) -> dict[str, Any]:
    question, answer = problem["question"], problem["answer"]
    try:
        truth = final_answer(answer)
    except DataError as error:
        raise DataError(f"gsm8k {split}, problem {index}: {error}") from error
    asked = f"{question} {said.instruction}"
    extra: dict[str, Any] = {"split": split, "index": index, "answer": answer, "question": question}
    if variant == "tool":
        extra["need_tools_kwargs"] = True
        extra["tools_kwargs"] = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
        extra["interaction_kwargs"] = {"query": asked, "ground_truth": truth}
    else:
        extra["interaction_kwargs"] = {"name": "gsm8k", "query": asked, "ground_truth": truth}
    return {
        "data_source": GSM8K,
        "prompt": [
            {"role": "system", "content": said.system},
            {"role": "user", "content": asked},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def _from_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        if not path.parent.is_dir():
            raise DataError(f"there is no folder {str(path.parent)!r}; name the one with train.jsonl and test.jsonl")
        inside = ", ".join(sorted(p.name for p in path.parent.iterdir())) or "nothing"
        raise DataError(f"there is no {path}; the folder must hold train.jsonl and test.jsonl, and it holds {inside}")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                problem = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: this is not JSON ({one_line(error)})") from error
            yield _checked(problem, f"{path}, line {number}")


def _from_hub(split: str) -> Iterable[dict[str, Any]]:
    from huggingface_hub import hf_hub_download  # only this path needs it, and it is slow to import

    name = f"main/{split}-00000-of-00001.parquet"
    why = unreachable()  # one attempt; the library itself would try for a minute
    try:
        path = hf_hub_download(GSM8K, name, repo_type="dataset", local_files_only=why is not None)
    except Exception as error:
        raise DataError(
            f"{GSM8K} cannot be fetched from the Hugging Face hub ({why or one_line(error)[:200]}); download train.jsonl "
            "and test.jsonl from OpenAI's grade-school-math repository and name their folder with --from"
        ) from error
    return [_checked(row, f"{GSM8K} {name}") for row in pq.read_table(path).to_pylist()]


def _checked(problem: Any, where: str) -> dict[str, Any]:
    fields = ("question", "answer")
    if not isinstance(problem, dict) or not all(isinstance(problem.get(f), str) for f in fields):
        raise DataError(f"{where}: a problem needs the texts 'question' and 'answer', not {str(problem)[:80]!r}")
    return problem
