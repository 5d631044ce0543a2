"""The documentation stays short."""

from __future__ import annotations

from tools.docs import blocks

MOST_WORDS = 43_800


def test_the_documentation_is_short() -> None:
    """README.md and the pages of the site, as `wc -w README.md docs/*.md` counts."""
    pages = [blocks.ROOT / "README.md", *blocks.DOCS.glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS
