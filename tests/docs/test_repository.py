"""The files by which others meet the project: workflows, forms, metadata. Services read them, which say nothing here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools import dist
from tools.compat import combinations
from tools.docs.blocks import ROOT

GITHUB = ROOT / ".github"
SCHEMAS = {
    "vendor.github-workflows": "workflows/*.yml",
    "custom.github-workflows-require-timeout": "workflows/*.yml",
    "vendor.github-issue-config": "ISSUE_TEMPLATE/config.yml",
    "vendor.github-issue-forms": "ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.dependabot": "dependabot.yml",
    "vendor.citation-file-format": "../CITATION.cff",
}


@pytest.mark.skipif(not importlib.util.find_spec("check_jsonschema"), reason="check-jsonschema is not installed")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_of_services_have_their_schemas(schema: str) -> None:
    files = [str(path) for path in GITHUB.glob(SCHEMAS[schema])]
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--default-filetype", "yaml", "--builtin-schema", schema]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_runs_what_the_continuous_integration_runs() -> None:
    """The targets of `.ci/run`; those of compat are in a matrix of their own, which has all combinations."""
    here = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    jobs = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    targets = jobs["tests"]["strategy"]["matrix"]["target"]
    assert [line for line in here if line not in targets and not line.startswith("compat ")] == []
    rows = [row["only"] for row in jobs["compat"]["strategy"]["matrix"]["include"]]
    tried = {combination for only in rows for combination in combinations.chosen(only)}
    assert {*combinations.DEFAULT, combinations.WHAT_PIP_INSTALLS} - tried == set()


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_targets_of_make_that_exist(path: Path) -> None:
    """And nothing else that the Makefile should do: no other command starts Python."""
    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= known
    assert not re.search(r"run: .*\b(python|pip|pytest)\b", text)


def test_the_version_is_the_same_everywhere() -> None:
    """In the metadata, in the citation, and as the newest release of the changelog, which has a date."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    dist.check_tag(f"v{version}")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    newest = re.findall(r"^## \[(\d.*)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert newest == (version, str(citation["date-released"]))


def test_a_tag_of_another_version_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"the tag is v9\.9\.9"):
        dist.check_tag("v9.9.9")


def test_the_supported_pythons_are_those_that_are_tried() -> None:
    assert set(dist.supported()) == {combination.py for combination in combinations.DEFAULT}
