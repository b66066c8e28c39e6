"""The command-line agent of `agent.yaml`: `small_agent.py`, started in each task's sandbox."""

from pathlib import Path

from polyturn.serving.openai.agents import CommandLineAgent

small = CommandLineAgent(
    command=("python3", "{home}/small_agent.py", "{instruction}"),
    files={"small_agent.py": Path(__file__).with_name("small_agent.py").read_text(encoding="utf-8")},
)
