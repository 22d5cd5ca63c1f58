"""The page in a real browser (Debian's chromium), against a server that plays scripted answers: chat, history, race, strip."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from page_stub import ANSWER, INFO, Stub, ask, ask_and_wait, words

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Open = Callable[..., Any]


class TestChat:
    def test_streams_an_answer_with_its_figures(self, open_page: Open, stub: Stub) -> None:
        page = open_page()
        assert INFO["model"] in page.inner_text("#about")
        stub.go_on.clear()
        ask(page, "hello")
        body = page.locator(".answer .body")
        api.expect(body).to_contain_text("Hello")
        assert body.get_attribute("aria-busy") == "true"
        assert body.inner_text() == "Hello"
        stub.go_on.set()
        page.locator(".facts").wait_for()
        assert body.inner_text() == ANSWER
        assert body.get_attribute("aria-busy") == "false"
        assert "9 tokens · 0.80 s · 11.3 tokens/s · duo" in page.inner_text(".facts")
        assert [page.inner_text(f"#figure-{name}") for name in ("speed", "yield", "accepted", "gain")] == [
            "11.3",
            "2.25",
            "50 %",
            "–",
        ]

    def test_sends_what_is_set_and_the_conversation(self, open_page: Open, stub: Stub) -> None:
        page = open_page()
        page.click("#gear")
        page.fill("[name=temperature]", "0.7")
        page.fill("[name=seed]", "11")
        page.fill("[name=system]", "Be kind.")
        page.click("dialog .done")
        ask_and_wait(page, "hello")
        ask_and_wait(page, "more")
        first, second = stub.asked
        assert (first["temperature"], first["seed"], first["stream"]) == (0.7, 11, True)
        assert first["duo"] == {"tokens": True, "timeline": True, "mode": None}
        assert "top_p" not in first
        assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
        assert second["messages"][2]["content"] == ANSWER

    def test_tokens_have_the_colours_of_their_sources(self, open_page: Open) -> None:
        page = open_page()
        answer = ask_and_wait(page, "hello")
        looks = {
            source: answer.locator(f".tok.{source}").first.evaluate(LOOK) for source in ("target", "model", "lookup", "recycling")
        }
        assert len({colour for colour, _, _ in looks.values()}) == 4
        assert [(line, style) for _, line, style in looks.values()] == [
            ("none", "solid"),
            ("underline", "solid"),
            ("underline", "dashed"),
            ("underline", "dotted"),
        ]
        assert page.locator("#legend .key").all_inner_texts() == ["target 4", "draft 2", "lookup 2", "recycling 1"]
        page.uncheck("#colours")
        assert answer.locator(".tok.model").first.evaluate(LOOK)[:2] == [looks["target"][0], "none"]
        page.reload()
        assert not page.is_checked("#colours")

    def test_a_token_says_its_probability_source_and_round(self, open_page: Open) -> None:
        page = open_page()
        answer = ask_and_wait(page, "hello")
        answer.locator(".tok", has_text="there").hover()
        tip = page.inner_text("#tip")
        assert "␣there" in tip
        assert "95 %" in tip
        assert "draft" in tip
        assert "round 2, which gave 3 tokens" in tip
        assert answer.locator(".tok.round").all_inner_texts() == ["there", ",", "you"]
        page.mouse.move(5, 5)
        assert page.is_hidden("#tip")
        answer.locator(".tok").first.focus()
        page.keyboard.press("ArrowRight")
        assert "␣there" in page.inner_text("#tip")

    def test_stop_ends_the_request_and_retry_asks_again(self, open_page: Open, stub: Stub) -> None:
        stub.answers["long"] = words("on " * 2000)
        stub.pace["duo"] = 0.02
        page = open_page()
        ask(page, "long")
        api.expect(page.locator(".body")).to_contain_text("on on on")
        page.click("#send[aria-label=Stop]")
        assert stub.client_left.wait(20)
        api.expect(page.locator(".answer .note")).to_have_text("Stopped.")
        assert "on on on" in page.inner_text(".body")
        stub.answers["long"] = words("short now")
        page.get_by_role("button", name="Retry: answer once more").click()
        page.locator(".facts").wait_for()
        assert page.locator(".answer").count() == 1
        assert page.inner_text(".body") == "short now"

    def test_copy(self, open_page: Open) -> None:
        page = open_page(permissions=["clipboard-read", "clipboard-write"])
        ask_and_wait(page, "hello").get_by_role("button", name="Copy answer").click()
        api.expect(page.locator("#status")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == ANSWER

    def test_an_error_in_mid_stream_is_shown_and_keeps_what_came(self, open_page: Open, stub: Stub) -> None:
        stub.fails = {"message": "the GPU is on fire", "type": "server_error", "param": None, "code": None}
        page = open_page()
        ask(page, "hello")
        api.expect(page.locator(".answer .note.failed")).to_have_text("the GPU is on fire")
        assert page.inner_text(".body") == "Hello"

    def test_asks_for_the_key_and_keeps_it_for_the_tab_only(self, open_page: Open, stub: Stub, browser: Any) -> None:
        stub.key = "s3cret"
        page = browser.new_page()
        page.goto(stub.url)
        page.locator("#locked").wait_for()
        assert page.evaluate("document.activeElement.name") == "key"
        page.keyboard.type("s3cret")
        page.keyboard.press("Enter")
        page.locator("#about b").wait_for()
        assert ask_and_wait(page, "hello").locator(".body").inner_text() == ANSWER
        assert "s3cret" not in page.evaluate("JSON.stringify(localStorage)")
        page.close()


LOOK = "(node) => { const s = getComputedStyle(node); return [s.color, s.textDecorationLine, s.textDecorationStyle]; }"


class TestHistory:
    def test_survives_a_reload_with_its_colours_and_timeline(self, open_page: Open, stub: Stub) -> None:
        page = open_page()
        ask_and_wait(page, "hello")
        page.reload()
        assert page.inner_text(".ask") == "hello"
        assert page.inner_text(".body") == ANSWER
        assert page.locator(".tok.lookup").count() == 2
        api.expect(page.locator("#lanes")).to_have_attribute("aria-label", re.compile("3 target passes, 3 waits, 9 draft steps"))
        assert len(stub.asked) == 1

    def test_a_reload_in_mid_answer_keeps_what_came(self, open_page: Open, stub: Stub) -> None:
        stub.answers["long"] = words("on " * 2000)
        stub.pace["duo"] = 0.02
        page = open_page()
        ask(page, "long")
        api.expect(page.locator(".body")).to_contain_text("on on on")
        page.reload()
        api.expect(page.locator(".body")).to_contain_text("on on on")
        assert page.inner_text(".answer .note") == "Stopped."

    def test_new_delete_and_clear(self, open_page: Open) -> None:
        page = open_page()
        for text in ("one", "two", "three"):
            page.click("#new")
            ask_and_wait(page, text)
        assert page.locator("#chats .open").all_inner_texts() == ["three", "two", "one"]
        page.get_by_role("button", name="two", exact=True).click()
        assert page.inner_text(".ask") == "two"
        delete = page.get_by_role("button", name="Delete two")
        delete.click()
        assert page.locator("#chats li").count() == 3  # the first press only asks
        delete.click()
        assert page.locator("#chats .open").all_inner_texts() == ["three", "one"]
        page.click("#clear")
        page.click("#clear")
        assert page.locator("#chats li").count() == 0
        assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('duo.chat.')).length") == 0

    def test_a_full_storage_loses_old_timelines_before_text(self, open_page: Open) -> None:
        page = open_page()
        ask_and_wait(page, "old")
        page.click("#new")
        page.evaluate(FILL_STORAGE)
        ask_and_wait(page, "new")
        kept = page.evaluate(
            "Object.keys(localStorage).filter((k) => k.startsWith('duo.chat.')).map((k) => JSON.parse(localStorage[k]))"
        )
        old, new = sorted(kept, key=lambda chat: chat["updated"])
        assert old["messages"][1]["content"] == new["messages"][1]["content"] == ANSWER
        assert "trace" not in old["messages"][1]


# All but 1,000 characters of what the browser gives.
FILL_STORAGE = """() => {
  for (const size of [1e6, 1e5, 1e4, 1e3]) {
    try { for (;;) localStorage.setItem(`fill${Math.random()}`, "x".repeat(size)); } catch {}
  }
}"""


class TestRace:
    def test_runs_both_shows_both_and_says_what_was_measured(self, open_page: Open, stub: Stub) -> None:
        stub.pace = {"off": 0.04, "duo": 0.04}
        page = open_page(reduced_motion="reduce")
        page.fill("#prompt", "hello")
        page.click("#race")
        api.expect(page.locator(".verdict strong")).to_have_text("2.50 × as fast as off")
        how = page.inner_text(".verdict .how")
        assert "off 2.00 s, duo 0.80 s, measured by the server" in how
        assert "The texts are identical, all 35 characters" in how
        assert "one after the other" in how
        assert page.locator(".track .body").all_inner_texts() == [ANSWER, ANSWER]
        assert "9 tokens · 4.5 tokens/s · 9 passes" in page.inner_text(".track >> nth=0")
        assert page.inner_text("#figure-gain") == "2.50 ×"
        warm, *timed = stub.asked
        assert warm["max_tokens"] == 1
        assert [body["duo"]["mode"] for body in timed] == ["duo", "off"]  # speculation learns nothing from the other run
        assert timed[0]["messages"] == timed[1]["messages"] == [{"role": "user", "content": "hello"}]
        page.reload()
        assert page.inner_text(".verdict strong") == "2.50 × as fast as off"

    def test_replays_side_by_side_at_the_measured_pace(self, open_page: Open, stub: Stub) -> None:
        stub.pace = {"off": 0.02, "duo": 0.02}
        page = open_page()
        page.fill("#prompt", "hello")
        page.click("#race")
        page.get_by_role("button", name="Replay the race").click()
        page.wait_for_function(AHEAD)

    def test_says_so_when_texts_differ(self, open_page: Open, stub: Stub) -> None:
        answers = stub.chunks

        def differing(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            stub.answers["x"] = words("same until here" if body["duo"]["mode"] == "off" else "same until there")
            return answers(body)

        stub.chunks = differing  # type: ignore[method-assign]
        page = open_page(reduced_motion="reduce")
        page.fill("#prompt", "x")
        page.click("#race")
        api.expect(page.locator(".verdict .how")).to_contain_text("The texts differ from character 12 on.")

    def test_draws_one_seed_for_both_where_the_answer_depends_on_it(self, open_page: Open, stub: Stub) -> None:
        page = open_page(reduced_motion="reduce")
        page.click("#gear")
        page.fill("[name=temperature]", "1")
        page.click("dialog .done")
        ask_and_wait(page, "hello")
        page.click("#race")  # nothing typed: the last question
        api.expect(page.locator(".verdict .how")).to_contain_text("Seed")
        _, _, duo, off = stub.asked
        assert off["seed"] == duo["seed"]
        assert "had been answered before" in page.inner_text(".verdict .how")
        assert page.locator(".answer").count() == 1

    def test_can_be_stopped(self, open_page: Open, stub: Stub) -> None:
        stub.answers["long"] = words("on " * 2000)
        stub.pace["duo"] = 0.02
        page = open_page()
        page.fill("#prompt", "long")
        page.click("#race")
        api.expect(page.locator(".track .body").last).to_contain_text("on on")
        page.keyboard.press("Escape")
        api.expect(page.locator(".answer .note")).to_have_text("Stopped.")
        assert "×" not in page.inner_text(".verdict")


# The faster run is done while the slower one is still writing.
AHEAD = """() => {
  const [off, duo] = [...document.querySelectorAll(".track .body")];
  const writes = (body) => body.classList.contains("running");
  return writes(off) && off.textContent && !writes(duo) && duo.textContent.endsWith("again.");
}"""


class TestStrip:
    def test_draws_both_lanes_sharply(self, open_page: Open) -> None:
        page = open_page(device_scale_factor=2)
        ask_and_wait(page, "hello")
        drawn = page.evaluate(LANE_COLOURS)
        assert drawn["ratio"] == 2
        assert drawn["target"] > 3  # passes in two shades, waits, the prompt
        assert drawn["draft"] > 1

    def test_says_what_a_span_was(self, open_page: Open) -> None:
        page = open_page()
        ask_and_wait(page, "hello")
        page.focus("#lanes")
        page.keyboard.press("End")
        assert "target pass, round 4" in page.inner_text("#tip")
        assert "checked 2 guesses, accepted 1" in page.inner_text("#tip")
        page.keyboard.press("ArrowLeft")
        assert "target waits for guesses" in page.inner_text("#tip")
        page.keyboard.press("ArrowDown")
        assert "draft step" in page.inner_text("#tip")
        page.mouse.move(5, 5)
        page.locator("#lanes").hover(position={"x": 20, "y": 52})
        assert "target reads the prompt" in page.inner_text("#tip")


LANE_COLOURS = """() => {
  const canvas = document.getElementById("lanes");
  const pen = canvas.getContext("2d");
  const ratio = canvas.width / canvas.getBoundingClientRect().width;
  const colours = (y) => new Set(new Uint32Array(pen.getImageData(0, y * ratio, canvas.width, 1).data.buffer)).size;
  return { ratio: Math.round(ratio), target: colours(53), draft: colours(90) };
}"""


def test_the_page_and_the_server_speak_the_same_language(browser: Any) -> None:
    pytest.importorskip("fastapi")
    from live import live

    with live() as server:
        page = browser.new_page(reduced_motion="reduce")
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.locator("#about b").wait_for()
        page.fill("#prompt", "Say something.")
        page.click("#race")
        api.expect(page.locator(".verdict .how")).to_contain_text("The texts are identical", timeout=60_000)
        assert page.locator(".track .tok").count() > 2
        assert re.search(r"[1-9]\d* target pass", page.get_attribute("#lanes", "aria-label"))
        assert float(page.inner_text("#figure-speed")) > 0
        page.close()
    assert errors == []
