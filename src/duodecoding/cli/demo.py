"""What `make demo` shows: an answer with speculation on, the same answer by plain decoding beside it, and what the same pair
would do where the target runs on a fast GPU."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from duodecoding.cli.lanes import WIDTH, first_passes, lanes
from duodecoding.cli.main import guarded
from duodecoding.cli.session import answer, engine, leaving
from duodecoding.cli.terminal import Terminal
from duodecoding.types import FREE_DRAFTS, EngineConfig, Mode, Result, SamplingParams

if TYPE_CHECKING:
    from duodecoding.backends.base import Vocabulary
    from duodecoding.llm import LLM
    from duodecoding.virtual import Simulation, Tally

# An edit: much of the answer stands in the prompt already, which is where guessing from text already seen helps.
PROMPT = (
    "Proofread this text and write the corrected version:\n\n"
    "The ferry leave the old harbour at nine in the morning and reaches the island shortly before noon. "
    "Tickets is sold on the pier, and children travel free of charge. "
    "In winter the ferry sails only on Saturdays, and the crossing takes an hour longer."
)
MESSAGES = [{"role": "user", "content": PROMPT}]
CONFIG = EngineConfig(draft="auto")
ELSEWHERE = "h200-7b"  # a 7B target on an H200
SHOWN_PASSES = 16
PARAMS = SamplingParams(max_tokens=128)
REPEATS = 3
TOKENS = 8  # in the pass whose price is told
DEAR = 2.5  # times one token; above it a gain is a surprise


def main() -> int:
    return guarded(lambda: show(Terminal()))


def show(terminal: Terminal) -> int:
    with engine(CONFIG, terminal) as guessing, engine(replace(CONFIG, mode=Mode.OFF), terminal) as alone:
        terminal.heading(f"{guessing.model_name} answers, and {guessing.draft_name} guesses ahead")
        terminal.say_line(PROMPT, style="dim")
        terminal.legend()
        shown, code = answer(terminal, guessing, lambda: guessing.stream_chat(MESSAGES, PARAMS), show_draft=True)
        if code:
            return code

        terminal.heading("\nThe same answer by plain decoding")
        with leaving(terminal), terminal.busy("answering again, with speculation and without"):
            guessed, plain = repeat(guessing, alone)
            price = price_of_a_pass()
            plain_seconds, simulated = replay(guessing.vocabulary, shown.token_ids)

    same = all(result.token_ids == shown.token_ids for result in guessed + plain)
    compare(terminal, guessed, plain, same)
    terminal.say_line("\n" + in_words(guessed, plain, price))

    terminal.heading(f"The same pair in virtual time, {ELSEWHERE}")
    terminal.say_line(elsewhere(plain_seconds, simulated.tally))
    terminal.draw(lanes(first_passes(simulated.timeline, SHOWN_PASSES), min(terminal.out.width, WIDTH)))
    return 0 if same else 1


def repeat(guessing: LLM, alone: LLM) -> tuple[list[Result], list[Result]]:
    """The answer again and again, in turn, so that a busy moment of the machine hits both. The prompt is read by then."""
    alone.chat(MESSAGES, PARAMS)
    pairs = [(guessing.chat(MESSAGES, PARAMS), alone.chat(MESSAGES, PARAMS)) for _ in range(REPEATS)]
    return [guessed for guessed, _ in pairs], [plain for _, plain in pairs]


def speed(results: list[Result]) -> float:
    return statistics.median(result.stats.tokens_per_second for result in results)


def compare(terminal: Terminal, guessed: list[Result], plain: list[Result], same: bool) -> None:
    on, off = guessed[0].stats, plain[0].stats
    rows: list[tuple[str, str | Text, str]] = [
        ("tokens", f"{on.new_tokens}", f"{off.new_tokens}"),
        ("same tokens", Text("yes", style="bold green") if same else Text("NO", style="bold red"), ""),
        ("rounds", f"{on.rounds}", f"{off.rounds}"),
        ("tokens per round", f"{on.tokens_per_round:.2f}", f"{off.tokens_per_round:.2f}"),
        (f"tokens/s, median of {REPEATS}", f"{speed(guessed):.1f}", f"{speed(plain):.1f}"),
    ]
    names = (f"speculation ({guessed[0].mode})", f"plain ({plain[0].mode})")
    terminal.table(("", *names), rows, right=names)


def price_of_a_pass() -> float:
    """How many times as long as one token a pass over a few takes on this machine."""
    from duodecoding import backends
    from duodecoding.cli.machine import pass_seconds
    from duodecoding.models import resolve

    target = backends.load_target(resolve(CONFIG.model).path, CONFIG)
    try:
        seconds = pass_seconds(target, (1, TOKENS))
    finally:
        target.close()
    return seconds[TOKENS] / seconds[1]


def in_words(guessed: list[Result], plain: list[Result], price: float) -> str:
    """What the numbers say about this machine."""
    gain = speed(guessed) / speed(plain)
    fewer = f"{plain[0].stats.rounds} rounds became {guessed[0].stats.rounds}"
    cost = f"a pass over {TOKENS} tokens costs {price:.1f} times one token here"
    if guessed[0].stats.rounds == plain[0].stats.rounds:
        return f"Guessing does not pay on this machine, {cost}, so the engine went on without ({gain:.2f} times as fast)."
    if gain >= 1.05:
        return f"{fewer}, and the answer comes {gain:.2f} times as fast{', although' if price > DEAR else ':'} {cost}."
    return f"{fewer}, but that is not faster on this machine ({gain:.2f} times): {cost}. On a GPU it costs little more."


def replay(vocabulary: Vocabulary, answer: list[int]) -> tuple[float, Simulation]:
    """The answer once more on an imagined machine: seconds without guessing, and with it."""
    from duodecoding import backends, models
    from duodecoding.bench.simulate import Study, chat_tokens, draft_name, setups
    from duodecoding.virtual import Recording, load_profile

    recording = Recording("demo", tuple(chat_tokens(vocabulary, PROMPT)), tuple(answer), PARAMS)
    name = draft_name(CONFIG)
    draft = None if name in FREE_DRAFTS else backends.load_draft(models.resolve(name).path, CONFIG, exact=True)
    try:
        study = Study([recording], draft, lookup=True, vocabulary=vocabulary.size)
        profile = load_profile(ELSEWHERE)
        plain, simulated = (next(study.simulations(setups(mode)[0], profile)) for mode in (Mode.OFF, Mode.DUO))
        plain.run()
        simulated.run()
    finally:
        if draft is not None:
            draft.close()
    return plain.tally.seconds, simulated


def elsewhere(plain_seconds: float, tally: Tally) -> str:
    took, alone = f"{1e3 * tally.seconds:.0f} ms in {tally.rounds} rounds", f"{1e3 * plain_seconds:.0f} ms in {tally.tokens}"
    return (
        f"With a 7B target on an H200, these {tally.tokens} tokens with these guesses would take {took} instead of {alone}: "
        f"{plain_seconds / tally.seconds:.2f} times as fast. Real tokens on an imagined clock; duo simulate plays through more."
    )


if __name__ == "__main__":
    sys.exit(main())
