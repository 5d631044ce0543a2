"""The site builds as `make docs` builds it: each link and each page of mkdocs.yml is there, without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs import site as site_hooks
from tools.docs.blocks import ROOT

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("mkdocstrings"), reason="the extra `docs` is not installed"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No font, script, style or picture of another host."""
    pattern = re.compile(r'(?:<(?:script|img|iframe)[^>]*src|<link[^>]*rel="?stylesheet"?[^>]*href)="?(https?:[^" >]+)')
    assert {address for page in site.rglob("*.html") for address in pattern.findall(page.read_text())} == set()
    assert "fetch(" not in (site / "index.html").read_text()


def test_the_list_for_programs_has_each_page(site: Path) -> None:
    """With what the page says first."""
    pages = {str(page.parent.relative_to(site)) for page in site.rglob("index.html")}
    listed = re.findall(
        r"^- \[.+\]\(https://[^/]+/raylaunch/([^)]*)\): \S.+$", (site / "llms.txt").read_text(), re.MULTILINE
    )
    assert {name.strip("/") or "." for name in listed} == pages


def test_a_page_is_listed_with_its_first_sentence() -> None:
    """Which may begin with code, and is not cut in it."""
    page = "# Title\n\n## Part\n\n    code\n\n`-d` (or `detach: true`, see [runs.md](runs.md)) starts a run. It ends.\n"
    assert site_hooks.beginning(page) == ("Title", "`-d` (or `detach: true`, see runs.md) starts a run.")


def test_links_show_titles_and_not_names_of_files(site: Path) -> None:
    pages = [page for page in site.rglob("index.html") if re.search(r">[a-z-]+\.md</a>", page.read_text())]
    assert pages == []


def test_docstrings_are_on_the_page_of_the_api(site: Path) -> None:
    text = (site / "api" / "index.html").read_text()
    for name in (
        "raylaunch.launch",
        "raylaunch.Handle.stop",
        "raylaunch.worker.State.commit",
        "raylaunch.worker.elastic",
    ):
        assert f'id="{name}"' in text
    assert not re.search(r":(param|returns?|raises)\b", text), "a list of parameters is shown as text"
