"""`duo run`: one prompt, one answer."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from duodecoding.cli.flags import (
    FLAT,
    NO_ENGINE_FLAGS,
    NO_RUN_FLAGS,
    NO_SAMPLING_FLAGS,
    EngineFlags,
    RunFlags,
    RunOptions,
    SamplingFlags,
    settings,
)
from duodecoding.errors import DuoError, UsageError
from duodecoding.trace import Did, Lane, Timeline, to_chrome
from duodecoding.types import EngineConfig, Result, SamplingParams

if TYPE_CHECKING:
    from duodecoding.llm import LLM
    from duodecoding.stream import Stream

STDIN = "\0stdin"  # stands for a `-` on the command line; no argument can hold a NUL

PROMPT = Parameter(help="What to answer. -, or nothing when input is piped: read it from stdin.")


def run(
    prompt: Annotated[str | None, PROMPT] = None,
    /,
    *,
    options: Annotated[RunFlags, FLAT] = NO_RUN_FLAGS,
    sampling: Annotated[SamplingFlags, FLAT] = NO_SAMPLING_FLAGS,
    engine_flags: Annotated[EngineFlags, FLAT] = NO_ENGINE_FLAGS,
) -> int:
    """Answer one prompt. The answer alone goes to stdout, everything else to stderr."""
    chosen = settings(RunOptions, options)
    params = settings(SamplingParams, sampling)
    config = settings(EngineConfig, engine_flags)
    text = read_prompt(prompt)
    check_text(chosen.system, "the system message")
    if chosen.raw and chosen.system:
        raise UsageError("--system with --raw", "a system message needs the chat template", "Leave one out.")
    return _answer(text, chosen, params, config)


def _answer(text: str, options: RunOptions, params: SamplingParams, config: EngineConfig) -> int:
    from duodecoding.cli.session import answer, engine
    from duodecoding.cli.terminal import Terminal

    terminal = Terminal()
    stream: Any = None
    with engine(config, terminal) as llm:

        def start() -> Any:
            nonlocal stream
            stream = llm.stream(text, params) if options.raw else llm.stream_chat(messages(text, options.system), params)
            return stream

        result, code = answer(terminal, llm, start, silent=options.json)
        floor = floor_words(llm, stream) if options.stats else ""
    if options.trace:
        write_trace(stream.timeline, options.trace, f"duo run, {llm.model_name}, mode {config.mode}")
    if options.json:
        terminal.print(json.dumps(as_record(result), ensure_ascii=False))
    if options.stats:
        terminal.stats(result, floor)
    return code


def floor_words(llm: LLM, stream: Stream) -> str:
    """How near the passes came to the memory's speed. Empty: there was none after the prompt, or it cannot be measured."""
    passes = [event.seconds for event in stream.timeline.of(Lane.TARGET, Did.PASS)]
    floor = llm.floor() if passes else None
    if floor is None:
        return ""
    middle = statistics.median(passes)
    return f"pass {1e3 * middle:.1f} ms, {floor.share(middle):.0%} of the {floor.where} memory's speed"


def write_trace(timeline: Timeline, name: str, title: str) -> None:
    try:
        Path(name).write_text(json.dumps(to_chrome(replace(timeline, title=title))) + "\n", encoding="utf-8")
    except OSError as error:
        raise DuoError(f"cannot write {name}", error.strerror or str(error)) from error


def messages(text: str, system: str) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text.removesuffix("\n")}]


def read_prompt(argument: str | None) -> str:
    """The prompt, from the command line or from stdin."""
    if argument is not None and argument != STDIN:
        text = check_text(argument, "the prompt")
    elif argument is None and sys.stdin.isatty():
        raise UsageError("no prompt", "none was given and stdin is a terminal", 'Try: duo run "Why is the sky blue?" or duo chat.')
    else:
        text = decode_stdin(sys.stdin.buffer.read())
    if not text.strip():
        raise UsageError("the prompt is empty", fix="Give some text as the argument or on stdin.")
    return text


def check_text(text: str, what: str) -> str:
    """Python keeps bytes of the command line that are not UTF-8 as lone surrogates. Refuse those."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid UTF-8", f"see its character {error.start + 1}") from None
    return text


def decode_stdin(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} of {len(data)} (0x{data[error.start]:02x}) does not belong there"
        raise UsageError("stdin is not valid UTF-8", found, "Convert it first, for instance with iconv.") from None


def as_record(result: Result) -> dict[str, Any]:
    """The one object of `--json`."""
    stats = {f.name: getattr(result.stats, f.name) for f in fields(result.stats)}
    return {
        "text": result.text,
        "tokens": result.token_ids,
        "finish_reason": result.finish_reason,
        "mode": str(result.mode),
        "speculation": result.speculation,
        "stats": stats | {"accepted_by_source": {str(source): n for source, n in result.stats.accepted_by_source.items()}},
    }
