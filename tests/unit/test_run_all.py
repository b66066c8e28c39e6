"""`make bench` runs only programs that start without arguments."""

from __future__ import annotations

from support.benchmark import load_benchmark

RUN_ALL = load_benchmark("run_all")


def test_benchmarks_of_make_bench_need_no_arguments() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in RUN_ALL.scripts().values()}
    assert len(texts) > 40
    assert [name for name, text in texts.items() if "required=True" in text or "__main__" not in text] == []
