"""Prepares published problem sets: writes the parquet files of a multi-turn run.

    prepare_gsm8k(Path("gsm8k"), variant="interaction", out=Path("data"))  ->  [data/train.parquet, data/test.parquet]
    prepare_geo3k(None, out=Path("data"))    problem, figure, answer  ->  a prompt with the figure, and the zoom tool
    prepare_search(None, out=Path("data"))   question, answers        ->  a prompt, the search tool, {"target": [...]}

Users run it once, with `polyturn data gsm8k`, `geo3k` or `search`. The columns are data_source, prompt, ability,
reward_model and extra_info, so other programs that expect these columns can read the files too. A figure is stored in the
row as a data URI, so that the files can be moved and the zoom tool sees the same image as the model.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.core.errors import ConfigError, DataError, did_you_mean, one_line
from polyturn.data.dataset import open_rows
from polyturn.tokens.hub import unreachable

GSM8K = "openai/gsm8k"
"""The rows' data source, and the data set's name on the hub."""
GEO3K = "hiyouga/geometry3k"
"""The rows' data source, and the data set's name on the hub."""
SEARCH = "PeterJinGo/nq_hotpotqa_train"
"""The data set's name on the hub."""

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
_GEO3K_SYSTEM = (
    "You solve geometry problems about a figure. You may look at a region of the figure more closely by calling the tool "
    "`image_zoom_in_tool`. Reason first, inside <think> and </think>, and end with the final answer in \\boxed{}."
)
_SEARCH_SYSTEM = (
    "You answer questions. Reason about what you know and what you lack; whatever you lack you can look up by calling the "
    "tool `search`, as often as you need. End with the answer alone, without an explanation, inside <answer> and </answer>."
)


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
        folder: The folder with OpenAI's `train.jsonl` and `test.jsonl`; None fetches the data set from the hub.
        variant: "tool" for rows that call `calc_gsm8k_reward`, "interaction" for rows that talk to `gsm8k`.
        out: The folder to write to; created if missing.
        system: The system prompt; None uses the variant's.
        instruction: A text after every question; None asks for the answer after `####`.

    Returns:
        The files written.

    Raises:
        ConfigError: the variant is unknown.
        DataError: a file is missing, a line is not a problem, or the hub cannot be reached.
    """
    if variant not in _SYSTEM:
        raise ConfigError(f"there is no gsm8k variant {variant!r}.{did_you_mean(variant, _SYSTEM)}")
    wording = _Wording(_SYSTEM[variant] if system is None else system, _INSTRUCTION if instruction is None else instruction)
    row = functools.partial(_gsm8k_row, variant=variant, wording=wording)
    return _prepare(row, functools.partial(_gsm8k_files, folder), out=out)


def prepare_geo3k(folder: Path | None, *, out: Path) -> list[Path]:
    """Write Geometry3K as `train.parquet` and `test.parquet`, each row with its figure and the zoom tool.

    Args:
        folder: The folder with the data set's parquet files, named by split; None fetches it from the hub.
        out: The folder to write to; created if missing.

    Returns:
        The files written.

    Raises:
        DataError: a file is missing, a row is not a problem, or the hub cannot be reached.
    """
    return _prepare(_geo3k_row, _parquet_files(GEO3K, folder), out=out)


def prepare_search(folder: Path | None, *, out: Path) -> list[Path]:
    """Write questions as `train.parquet` and `test.parquet`, each row with the search tool.

    Args:
        folder: The folder with `train*.parquet` and `test*.parquet`, with the columns question and golden_answers, and
            data_source if they come from several sets; None fetches Natural Questions and HotpotQA from the hub.
        out: The folder to write to; created if missing.

    Returns:
        The files written.

    Raises:
        DataError: a file is missing, a row is not a question, or the hub cannot be reached.
    """
    return _prepare(search_row, _parquet_files(SEARCH, folder), out=out)


def final_answer(answer: str) -> str:
    """Return the text after the last `####` of a worked answer, without commas: "… #### 1,250" -> "1250".

    Raises:
        DataError: the answer has no `####`, or no text after it.
    """
    _, mark, after = answer.rpartition("####")
    value = after.strip().replace(",", "")
    if not mark or not value:
        raise DataError(f"the answer must end in '#### <number>'; this one ends in {answer[-40:]!r}")
    return value


class _Wording(NamedTuple):
    system: str
    instruction: str


def _gsm8k_row(problem: Any, *, index: int, split: str, where: str, variant: str, wording: _Wording) -> dict[str, Any]:
    fields = ("question", "answer")
    if not isinstance(problem, dict) or not all(isinstance(problem.get(f), str) for f in fields):
        raise DataError(f"{where}: a problem needs the texts 'question' and 'answer', not {str(problem)[:80]!r}")
    question, answer = problem["question"], problem["answer"]
    try:
        truth = final_answer(answer)
    except DataError as error:
        raise DataError(f"gsm8k {split}, problem {index}: {error}") from error
    question_text = f"{question} {wording.instruction}"
    extra: dict[str, Any] = {"split": split, "index": index, "answer": answer, "question": question}
    if variant == "tool":
        extra["need_tools_kwargs"] = True
        extra["tools_kwargs"] = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
        extra["interaction_kwargs"] = {"query": question_text, "ground_truth": truth}
    else:
        extra["interaction_kwargs"] = {"name": "gsm8k", "query": question_text, "ground_truth": truth}
    return {
        "data_source": GSM8K,
        "prompt": [
            {"role": "system", "content": wording.system},
            {"role": "user", "content": question_text},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def _geo3k_row(problem: Mapping[str, Any], *, index: int, split: str, where: str) -> dict[str, Any]:
    text, answer = problem.get("problem"), problem.get("answer")
    if not isinstance(text, str) or not isinstance(answer, str):
        raise DataError(f"{where}: a problem needs the texts 'problem' and 'answer', not {sorted(problem)}")
    figures = [_data_uri(item, where=where) for item in problem.get("images") or []]
    if len(figures) != max(1, text.count("<image>")):
        raise DataError(f"{where}: the problem refers to {text.count('<image>')} figures, but 'images' has {len(figures)}")
    tools = {"image_zoom_in_tool": {"create_kwargs": {"image": figures[0]}}}
    return {
        "data_source": GEO3K,
        "prompt": [
            {"role": "system", "content": _GEO3K_SYSTEM},
            {"role": "user", "content": text if "<image>" in text else f"<image>\n{text}"},
        ],
        "images": figures,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "need_tools_kwargs": True, "tools_kwargs": tools},
    }


def search_row(problem: Mapping[str, Any], *, index: int, split: str, where: str) -> dict[str, Any]:
    """Return the row of a question for the search tool.

    Raises:
        DataError: the problem lacks `question` or `golden_answers`.
    """
    question, answers = problem.get("question"), problem.get("golden_answers")
    if not isinstance(question, str) or not isinstance(answers, list) or not answers:
        raise DataError(f"{where}: a row needs a text 'question' and a list 'golden_answers', not {sorted(problem)}")
    source = f"searchR1_{problem.get('data_source') or 'questions'}"
    tools = {"search": {"create_kwargs": {"data_source": source}}}
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": _SEARCH_SYSTEM}, {"role": "user", "content": question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [str(a) for a in answers]}},
        "extra_info": {"split": split, "index": index, "need_tools_kwargs": True, "tools_kwargs": tools},
    }


def _prepare(row: Callable[..., dict[str, Any]], files_of: Callable[[str], list[Path]], *, out: Path) -> list[Path]:
    """Convert each split's rows with `row`, write them, and return the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for split in ("train", "test"):
        located = ((rows.row(i), rows.where(i)) for rows in map(open_rows, files_of(split)) for i in range(len(rows)))
        made_rows = [row(problem, index=index, split=split, where=where) for index, (problem, where) in enumerate(located)]
        written.append(out / f"{split}.parquet")
        pq.write_table(pa.Table.from_pylist(made_rows), written[-1])
    return written


def _gsm8k_files(folder: Path | None, split: str) -> list[Path]:
    if folder is None:
        from huggingface_hub import hf_hub_download  # only this path needs it, and it is slow to import

        fetch = functools.partial(hf_hub_download, GSM8K, f"main/{split}-00000-of-00001.parquet")
        advice = "download train.jsonl and test.jsonl from OpenAI's grade-school-math repository and name their folder"
        return [_fetched(GSM8K, fetch, advice=advice)]
    path = folder / f"{split}.jsonl"
    if not folder.is_dir():
        raise DataError(f"there is no folder {str(folder)!r}; use the one with train.jsonl and test.jsonl")
    if not path.is_file():
        inside = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise DataError(f"there is no {path}; the folder needs train.jsonl and test.jsonl, but contains {inside}")
    return [path]


def _parquet_files(name: str, folder: Path | None) -> Callable[[str], list[Path]]:
    """Return a function that finds a split's parquet files, in a folder or in the data set on the hub."""
    where = f"the dataset {name}" if folder is None else str(folder)
    if folder is None:
        from huggingface_hub import snapshot_download  # only this path needs it, and it is slow to import

        fetch = functools.partial(snapshot_download, name, allow_patterns=["*.parquet"])
        folder = _fetched(name, fetch, advice="download its parquet files and name their folder")
    elif not folder.is_dir():
        raise DataError(f"there is no folder {where!r}; use the one with the parquet files of {name}")
    parquet_files = sorted(folder.glob("**/*.parquet"))

    def files_of(split: str) -> list[Path]:
        if not (files := [path for path in parquet_files if path.name.startswith(split)]):
            raise DataError(
                f"{where} has no {split}*.parquet; it contains {[p.name for p in parquet_files] or 'no parquet file'}"
            )
        return files

    return files_of


def _fetched(name: str, fetch: Callable[..., str], *, advice: str) -> Path:
    """Download a data set of the hub with `fetch` and return its path."""
    why = unreachable()  # one attempt; the library itself would try for a minute
    try:
        return Path(fetch(repo_type="dataset", local_files_only=why is not None))
    except Exception as error:
        raise DataError(
            f"{name} cannot be fetched from the Hugging Face hub ({why or one_line(error)[:200]}); {advice} with --from"
        ) from error


def _data_uri(item: Any, *, where: str) -> str:
    data = item.get("bytes") if isinstance(item, Mapping) else item
    if not isinstance(data, bytes):
        raise DataError(f"{where}: a figure must be bytes, or have 'bytes'; this one is {item!r:.80}")
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
