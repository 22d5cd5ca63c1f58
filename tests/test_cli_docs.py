"""docs/cli.md shows what the program prints."""

from __future__ import annotations

from pathlib import Path

from duodecoding.cli.docs import PAGE, help_text, renew
from duodecoding.cli.main import app

ROOT = Path(__file__).parents[1]


def test_help_blocks_are_up_to_date():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert renew(page) == page, "Run: python -m duodecoding.cli.docs"


def test_every_command_is_on_the_page():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for name in app:
        assert name.startswith("-") or f"<!-- help: {name} -->" in page


def test_a_block_is_renewed():
    stale = "before\n<!-- help: models -->\nold\n<!-- end -->\nafter"
    assert help_text("models") in renew(stale)
    assert "old" not in renew(stale)
    assert renew(renew(stale)) == renew(stale)
