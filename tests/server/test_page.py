"""The page in a real browser (Debian's chromium), against a server that plays scripted answers."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from page_stub import INFO, PAGE, Stub, words

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
api.expect.set_options(timeout=20_000)
browser_only = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
ANSWER = "Hello there, you and you too again."
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.close()


@pytest.fixture
def open_page(browser: Any, stub: Stub) -> Iterator[Open]:
    """Opens the page in a browser of its own. No script may fail, no request may leave the server."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(**options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((stub.url, "data:")) else wrong.append(request.url))
        page.goto(stub.url)
        page.locator("#about b").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ask_and_wait(page: Any, text: str) -> Any:
    """The last answer, finished."""
    ask(page, text)
    page.locator(".answer").last.locator("footer button").first.wait_for()
    return page.locator(".answer").last


def test_policy_allows_the_script_of_the_page_and_no_other() -> None:
    html = PAGE.read_text("utf-8")
    (script,) = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html, f"the script changed: its policy is now 'sha256-{digest}'"
    assert "innerHTML" not in html
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", html)


@browser_only
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


@browser_only
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


@browser_only
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


@browser_only
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
EVIL = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> <svg onload=alert(1)>

[click](javascript:window.hacked=3) [data](data:text/html,<script>1</script>) [ok](https://example.org/a?b=1)

![beacon](https://example.org/pixel.png) &lt;b&gt; </div></article><iframe srcdoc="<script>parent.hacked=4</script>">

```html"><script>window.hacked = 5</script>
<script>window.hacked = 6</script>
```

"""


@browser_only
class TestModelText:
    def test_never_runs_as_script(self, open_page: Open, stub: Stub) -> None:
        stub.answers["evil"] = words(EVIL, "model")
        page = open_page()
        body = ask_and_wait(page, "evil").locator(".body")
        assert page.evaluate("window.hacked") is None
        assert body.locator("script, img, svg:not(button svg), iframe, [onerror], [onload]").count() == 0
        assert "<script>window.hacked = 1</script>" in body.inner_text()
        assert (
            body.locator("a").evaluate_all("(all) => all.map((a) => [a.protocol, a.rel])")
            == [["https:", "noopener noreferrer"]] * 2
        )
        body.get_by_text("[click]").click()
        page.reload()
        assert page.evaluate("window.hacked") is None

    def test_nor_do_questions_titles_and_errors(self, open_page: Open, stub: Stub) -> None:
        stub.fails = {"message": EVIL, "type": "x", "param": None, "code": None}
        page = open_page()
        ask(page, EVIL)
        page.locator(".answer .note.failed").wait_for()
        page.reload()
        assert page.locator("#chats .open").count() == 1
        assert page.evaluate("window.hacked") is None
        assert page.locator("body > script").count() == page.locator("script").count() == 1

    def test_policy_stops_what_would_slip_through(self, open_page: Open) -> None:
        page = open_page()
        for slip in (
            "document.body.innerHTML = '<img src=x onerror=hacked=1>'",
            "document.body.setAttribute('onclick', 'hacked=1')",
        ):
            with pytest.raises(api.Error, match="Trusted"):
                page.evaluate(slip)
        assert page.evaluate("window.hacked") is None

    @pytest.mark.parametrize(
        ("text", "selector", "inside"),
        [
            ("## A *b* `c`", "h4", "A b c"),
            ("- one\n- two\n  - three\n\nafter", "ul > li > ul > li", "three"),
            ("3. c\n4. d", "ol[start='3'] > li:nth-child(2)", "d"),
            ("a **bold word** z", "strong", "bold word"),
            ("an _em_ and snake_case_name", "em", "em"),
            ("`a*b*c`", "code", "a*b*c"),
            ("```py\nx = 1\n\ny\n```\nafter", "pre code", "x = 1\n\ny"),
            ("```py\nunclosed", "pre code", "unclosed"),
            ("see https://example.org/x.", "a", "https://example.org/x"),
            ("> said", "blockquote", "said"),
            ("2 * 3 * 4 and \\*this\\*", "p:not(:has(em))", "2 * 3 * 4 and *this*"),
        ],
    )
    def test_markdown(self, open_page: Open, stub: Stub, text: str, selector: str, inside: str) -> None:
        stub.answers["md"] = words(text, "model")
        found = ask_and_wait(open_page(), "md").locator(f".body {selector}")
        assert found.all_inner_texts() == [inside]
        assert found.locator(".tok.model").count() > 0  # colours stay inside the formatting


@browser_only
class TestHands:
    def test_keys(self, open_page: Open, stub: Stub) -> None:
        stub.answers["a\nb"] = words("on " * 2000)
        stub.pace["duo"] = 0.02
        page = open_page()
        page.locator("#gear").focus()
        page.keyboard.press("/")
        page.keyboard.type("a")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("b")
        assert stub.asked == []
        page.keyboard.press("Enter")
        api.expect(page.locator(".body")).to_contain_text("on on")
        assert stub.asked[0]["messages"] == [{"role": "user", "content": "a\nb"}]
        page.keyboard.press("Escape")
        assert stub.client_left.wait(20)

    def test_everything_can_be_reached_with_the_tab_key(self, open_page: Open) -> None:
        page = open_page()
        ask_and_wait(page, "hello")
        page.evaluate("document.activeElement.blur()")
        reached = set()
        for _ in range(24):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("(({ id, ariaLabel, innerText }) => id || ariaLabel || innerText)(document.activeElement)"))
        for name in (
            "new",
            "clear",
            "gear",
            "Hello",
            "Copy answer",
            "Retry: answer once more",
            "colours",
            "lanes",
            "prompt",
            "race",
        ):
            assert name in reached

    def test_a_phone_shows_all_of_it_without_sideways_scrolling(self, open_page: Open, stub: Stub) -> None:
        stub.answers["wide"] = words(f"```\n{'x' * 300}\n```\n\n{'y' * 300} https://example.org/{'z' * 200}")
        page = open_page(viewport={"width": 360, "height": 700}, is_mobile=True, has_touch=True, reduced_motion="reduce")
        ask_and_wait(page, "wide")
        assert page.evaluate(WIDEST) <= 360
        page.click("#race")
        page.locator(".verdict strong", has_text="as fast").wait_for()
        assert page.evaluate(WIDEST) <= 360
        page.click("#menu")
        page.locator("#chats .open").click()
        api.expect(page.locator("#menu")).to_have_attribute("aria-expanded", "false")

    def test_dark_and_light(self, open_page: Open) -> None:
        page = open_page(color_scheme="dark")
        api.expect(page.locator("body")).to_have_css("background-color", "rgb(19, 20, 23)")
        page.click("#gear")
        page.select_option("[name=theme]", "light")
        page.click("dialog .done")
        api.expect(page.locator("body")).to_have_css("background-color", "rgb(253, 252, 250)")

    def test_nothing_below_the_text_moves_while_it_streams(self, open_page: Open, stub: Stub) -> None:
        stub.go_on.clear()
        page = open_page()
        before = page.evaluate(PLACES)
        ask(page, "hello")
        page.locator(".tok").first.wait_for()
        assert page.evaluate(PLACES) == before
        stub.go_on.set()
        page.locator(".facts").wait_for()
        assert page.evaluate(PLACES) == before


WIDEST = """() => {
  const right = (node) => node.getBoundingClientRect().right;
  return Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll("main > *, #column > *")].map(right));
}"""
PLACES = """() => ["dock", "lanes", "prompt", "send", "legend"].map((id) => {
  const { x, y, width, height } = document.getElementById(id).getBoundingClientRect();
  return [id, x, y, width, height];
})"""


@browser_only
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
