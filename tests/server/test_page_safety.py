"""The page in a real browser: what a model writes stays text, and every hand can use it: keys, phones, dark rooms."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest
from page_stub import PAGE, Stub, ask, ask_and_wait, words

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Open = Callable[..., Any]


def test_policy_allows_the_script_of_the_page_and_no_other() -> None:
    html = PAGE.read_text("utf-8")
    (script,) = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html, f"the script changed: its policy is now 'sha256-{digest}'"
    assert "innerHTML" not in html
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", html)


EVIL = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> <svg onload=alert(1)>

[click](javascript:window.hacked=3) [data](data:text/html,<script>1</script>) [ok](https://example.org/a?b=1)

![beacon](https://example.org/pixel.png) &lt;b&gt; </div></article><iframe srcdoc="<script>parent.hacked=4</script>">

```html"><script>window.hacked = 5</script>
<script>window.hacked = 6</script>
```

"""


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
