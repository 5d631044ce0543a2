"""What mkdocs does for the site beside its plugins: titles in place of the names of files, links to files that are not
pages, and `llms.txt`.

`make docs` builds the site; mkdocs.yml names this file as a hook.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\(\.\./([^)\s]+)\)")
_NAME = re.compile(r"\[([a-z-]+\.md)\](?=\()")
_pages: dict[str, str] = {}
"""The Markdown of each page, by its path below docs/."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Lead links to files beside docs/ to the repository, and show a page's title where a link has the name of its file."""
    markdown = _NAME.sub(lambda match: f"[{_title(Path(config['docs_dir'], match[1]))}]", markdown)
    _pages[page.file.src_uri] = markdown
    return _LINK.sub(lambda match: f"]({config['extra']['social'][0]['link']}/blob/main/{match[1]})", markdown)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write `llms.txt`: the title, and for each part its pages with what they say first. See llmstxt.org."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for part, source in _entries(config["nav"]):
        if part:
            lines += ["", f"## {part}", ""]
        title, first = beginning(_pages[source])
        address = "" if source == "index.md" else source.removesuffix(".md") + "/"
        lines.append(f"- [{title}]({config['site_url']}{address}): {first}")
    Path(config["site_dir"], "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _entries(nav: Any) -> Iterator[tuple[str, str]]:
    """Each page, with the title of its part if it is the first page there."""
    for item in nav:
        ((title, below),) = item.items()
        for number, (_, source) in enumerate(_entries(below) if isinstance(below, list) else [("", below)]):
            yield ("" if number else title), source


def _title(page: Path) -> str:
    """The first heading."""
    return page.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0]


def beginning(markdown: str) -> tuple[str, str]:
    """The title of a page, and its first sentence."""
    _, _, text = markdown.partition("# ")
    title, _, rest = text.partition("\n")
    prose = next(part for part in rest.split("\n\n") if part.strip() and not re.match(r"\s*(<|[#|]|- |```|    )", part))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return title, re.split(r"(?<=\.) ", plain)[0]
