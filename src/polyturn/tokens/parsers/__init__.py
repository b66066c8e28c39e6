"""Parses the model's text into content, tool calls and reasoning. The results are never turned back into tokens.

    <think>2 and 2</think>Let me add.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>
    ->  reasoning "2 and 2", content "Let me add.", one call

A call that cannot be parsed is kept as a call with an error, which the model reads in place of a result. So a malformed call
counts as a call. A call inside reasoning is not executed, unless an option says so. Parsers take linear time and never
evaluate code. Each model family has a file; `build_parser` chooses a parser by name, or by the chat template.
"""

from polyturn.tokens.parsers.base import ParsedText, ParsedTurn, ToolCallParser, TurnParser, parsers
from polyturn.tokens.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from polyturn.tokens.parsers.detect import build_parser, detect, detect_reasoning
from polyturn.tokens.parsers.glm import GlmParser
from polyturn.tokens.parsers.gpt_oss import GptOssParser
from polyturn.tokens.parsers.hermes import HermesParser
from polyturn.tokens.parsers.kimi_k2 import KimiK2Parser
from polyturn.tokens.parsers.llama3 import Llama3Parser
from polyturn.tokens.parsers.minimax import MinimaxM2Parser
from polyturn.tokens.parsers.mistral import MistralParser
from polyturn.tokens.parsers.plain import PlainParser
from polyturn.tokens.parsers.pythonic import PythonicParser
from polyturn.tokens.parsers.qwen3_coder import Qwen3CoderParser
from polyturn.tokens.parsers.reasoning import ReasoningFormat, reasoning_formats

__all__ = [
    "DeepSeekV3Parser", "DeepSeekV31Parser", "GlmParser", "GptOssParser", "HermesParser", "KimiK2Parser", "Llama3Parser",
    "MinimaxM2Parser", "MistralParser", "ParsedText", "ParsedTurn", "PlainParser", "PythonicParser", "Qwen3CoderParser",
    "ReasoningFormat", "ToolCallParser", "TurnParser", "build_parser", "detect", "detect_reasoning", "parsers",
    "reasoning_formats",
]  # fmt: skip
