"""Our own work between two passes of the target: what a GPU waits for. Recorded answers stand in for the target.

    python benchmarks/host.py [--pass-ms 5] [--answers 7] [--tokens 96] [--temperature 0.8] [--calls 30]

The target takes `--pass-ms` for a pass and no CPU time, and says what the real one said; draft worker, tree, planner, lookup and
recycling are real. Reported: the time from the end of a pass to the beginning of the next one, waits for guesses left out.
`--calls N`: where it goes, the N dearest functions.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Sequence
from typing import Any

import common

from duodecoding import LLM, EngineConfig, SamplingParams, prompts
from duodecoding.core import Choose
from duodecoding.sampling import Choice, Sampler
from duodecoding.tree import ROOT, PassNode
from duodecoding.virtual import load_profile


class Recording:
    """A target that knows its answer. A pass ends when its time is over, however busy this process is meanwhile."""

    weights_bytes = 0
    pass_sizes: Sequence[int] = ()
    overlaps = True

    def __init__(self, vocabulary: Any, context: int, pass_seconds: float) -> None:
        self.vocabulary, self.context, self._seconds = vocabulary, context, pass_seconds
        self.text: list[int] = []  # prompt and answer
        self.ended = self._end = 0.0
        self.gaps: list[tuple[int, float]] = []  # guesses of a pass, seconds since the last one

    def open(self, prompt: Sequence[int], params: SamplingParams) -> _Conversation:
        self.ended = 0.0
        return _Conversation(prompt, params, self.vocabulary.size)

    def verify(self, work: Sequence[tuple[Any, Sequence[PassNode]]]) -> list[Choose]:
        self._end = time.perf_counter() + self._seconds
        conversation, nodes = work[0]
        if self.ended:
            self.gaps.append((len(nodes), self._end - self._seconds - self.ended))
        at = len(conversation.tokens)

        def choose(i: int) -> Choice:
            depth = 0
            while i != ROOT:
                depth, i = depth + 1, nodes[i].parent
            return Choice(self.text[at + depth], 0.0)

        return [choose]

    def done(self) -> bool:
        return time.perf_counter() >= self._end

    def finish(self) -> None:
        """Asleep for most of it, then awake, as a GPU's driver is."""
        while (left := self._end - time.perf_counter()) > 0:
            if left > 2e-4:
                time.sleep(left - 2e-4)
        self.ended = time.perf_counter()

    def abort(self) -> None: ...

    def close(self) -> None: ...


class _Conversation:
    reused = 0

    def __init__(self, prompt: Sequence[int], params: SamplingParams, vocab: int) -> None:
        self.tokens, self.sampler = list(prompt), Sampler(params, prompt, vocab)

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--pass-ms", type=float, default=5.0)
    parser.add_argument("--answers", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--calls", type=int, default=0)
    options = parser.parse_args()
    params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, ignore_eos=True)
    questions = [prompt for row in zip(*prompts.load().values(), strict=False) for prompt in row][: options.answers]
    with LLM.from_config(EngineConfig(model=options.model, mode="off", ctx_size=2048)) as llm:
        asked = [llm.chat_tokens([{"role": "user", "content": question.turns[0]}]) for question in questions]
        texts = [(prompt, [*prompt, *llm.generate(prompt, params).token_ids]) for prompt in asked]
    config = EngineConfig(model=options.model, mode="duo", ctx_size=2048, threads=1, threads_draft=1)
    with LLM.from_config(config) as llm:
        target = Recording(llm.vocabulary, 2048, options.pass_ms / 1e3)
        real, llm._target = llm._target, target  # type: ignore[assignment]
        llm.use_costs(load_profile("h200-7b"))
        profile = cProfile.Profile()
        waits, per_round, guesses = [], [], []
        for turn, (prompt, text) in enumerate(texts):
            target.text, target.gaps = [*text, *text[-1:] * 64], []
            if options.calls and turn:
                profile.enable()
            result = llm.generate(prompt, params)
            profile.disable()
            if list(result.token_ids) != text[len(prompt) :]:
                raise SystemExit("the answer is not the recorded one")
            if turn:
                stats = result.stats
                waits.append(stats.wait_seconds / stats.rounds)
                per_round.append(sum(gap for _, gap in target.gaps) / len(target.gaps) - waits[-1])
                guesses.append(sum(n for n, _ in target.gaps) / len(target.gaps))
                print(f"{1e6 * per_round[-1]:.0f} us, {guesses[-1]:.1f} guesses, {stats.tokens_per_round:.2f} tokens a round")
        llm._target = real
        if options.calls:
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.calls)
    spread = common.spread([1e6 * seconds for seconds in per_round], 0)
    settings = {"pass_ms": options.pass_ms, "answers": len(texts) - 1, "tokens": options.tokens, "temperature": options.temperature}
    common.write("host", settings, {"microseconds a round": spread, "guesses a pass": common.spread(guesses, 1)})


if __name__ == "__main__":
    main()
