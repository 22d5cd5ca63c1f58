"""Counters for Prometheus: vLLM's names behind our prefix, and how idle both processors were while answers ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from duodecoding.trace import Did, Event
from duodecoding.types import Mode, Result, Source, Token

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)  # seconds
NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5)


class Metrics:
    def __init__(self, *, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"duo:{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"duo:{name}", text, buckets=buckets, registry=self._registry)

        Gauge("duo:num_requests_running", "Answers being given.", registry=self._registry).set_function(running)
        Gauge("duo:num_requests_waiting", "Requests in the queue.", registry=self._registry).set_function(waiting)
        self._first = histogram("time_to_first_token_seconds", "From a request to its first token.", FIRST)
        self._next = histogram("inter_token_latency_seconds", "Between tokens; those of a round share its time.", NEXT)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._cached = counter("prefix_cache_hits", "Tokens of prompts that were in the KV cache.")
        self._success = counter("request_success", "Answers by how they ended.", ["finished_reason"])
        self._errors = counter("request_errors", "Errors by HTTP status.", ["status"])
        self._drafts = counter("spec_decode_num_drafts", "Passes of the target with guesses.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Guesses that the target verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Guesses that were right.")
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Right guesses by their place in the round.", ["position"]
        )
        self._target_idle = counter("target_idle_seconds", "Time of answers in which the target did not work.")
        self._draft_idle = counter("draft_idle_seconds", "Time of answers in which the draft did not work.")
        self._restarts = counter("draft_restarts", "The draft worker was started again.")

    def part(self, tokens: Sequence[Token], spans: Sequence[Event], since: float, *, first: bool) -> None:
        """A round's tokens came `since` seconds after what was before them."""
        if first:
            self._first.observe(since)
        else:
            for _ in tokens:
                self._next.observe(since / len(tokens))
        self._drafts.inc(sum(1 for span in spans if span.name is Did.PASS and span.args["nodes"] > 1))

    def finished(self, result: Result) -> None:
        stats = result.stats
        self._success.labels(result.finish_reason).inc()
        self._prompt.inc(stats.prompt_tokens)
        self._generated.inc(stats.new_tokens)
        self._cached.inc(stats.reused_tokens)
        self._drafted.inc(stats.verified)
        self._accepted.inc(stats.accepted)
        for position, count in accepted_per_position(result.tokens).items():
            self._per_position.labels(str(position)).inc(count)
        self._target_idle.inc(max(0.0, stats.seconds - stats.target_busy_seconds))
        if result.mode is not Mode.OFF:
            self._draft_idle.inc(max(0.0, stats.seconds - stats.draft_busy_seconds))
        self._restarts.inc(stats.draft_restarts)

    def error(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


def accepted_per_position(tokens: Sequence[Token]) -> dict[int, int]:
    """How many guesses were right at each place of a round, from 0."""
    found: dict[int, int] = {}
    place, number = 0, -1
    for token in tokens:
        place = place + 1 if token.round == number else 0
        number = token.round
        if token.source is not Source.TARGET:
            found[place] = found.get(place, 0) + 1
    return found
