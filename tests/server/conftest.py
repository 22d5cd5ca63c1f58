"""A browser for tests of the page. Without playwright or chromium they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from page_stub import Stub

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
Open = Callable[..., Any]


@pytest.fixture(scope="module")  # while it is open, nothing else in this thread can run an event loop
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    api.expect.set_options(timeout=20_000)
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
