"""DuoDecoding: a large language model answers faster, without changing its answer.

A small draft guesses ahead; the target checks many guesses in one pass and keeps exactly the tokens it would have written alone.
"""

from typing import TYPE_CHECKING

from duodecoding.errors import DuoError
from duodecoding.types import EngineConfig, Mode, Result, SamplingParams, Source, Stats, Token

if TYPE_CHECKING:
    from duodecoding.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "DuoError", "EngineConfig", "Mode", "Result", "SamplingParams", "Source", "Stats", "Token"]


def __getattr__(name: str) -> object:
    # `LLM` pulls in llama.cpp; the command line's --help should not wait for that.
    if name == "LLM":
        from duodecoding import llm

        return llm.LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
