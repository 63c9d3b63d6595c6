"""Links and anchors of the documentation lead somewhere; what the program names of it is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, anchors, links, name_of

# What tells people to read a page: messages, settings, images, examples.
_NAMES_PAGES = ("ddl_airflow", "ops_lib", "docker", "dags", "scripts", "tests")
_PAGE = re.compile(r"\b(docs/[\w/-]+\.(?:md|json|svg|txt))(?:#([\w-]+))?")


def _wrong(page: Path) -> list[str]:
    wrong = []
    for target in links(page):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.is_relative_to(ROOT) or not there.exists():
            wrong.append(f"{target}: is not there")
        elif anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            wrong.append(f"{target}: no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_of_this_repository(page):
    assert _wrong(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.test_docs_links.ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A heading, here\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    good = "[a](there.md) [b](there.md#a-heading-here) `[c](gone.md)` [d](https://example.com)\n"
    page.write_text(good + "[![e](gone.svg)](there.md#no-heading) [f](../out.md) [g](#here)\n")
    assert [one.split(":")[0] for one in _wrong(page)] == [
        *("there.md#no-heading", "gone.svg", "../out.md", "#here"),
    ]


def test_pages_that_the_program_and_its_files_name_are_there():
    named = {
        (found[1], found[2] or "")
        for folder in _NAMES_PAGES
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in {"", ".py", ".h", ".cc", ".yml", ".yaml", ".md"}
        for found in _PAGE.finditer(path.read_text("utf-8", "replace"))
    }
    assert len(named) > 10
    gone = {name for name, _ in named if not (ROOT / name).exists()}
    assert gone == set()
    assert [one for one in named if one[1] and one[1] not in anchors(ROOT / one[0])] == []


def test_screenshots_are_small_and_taken_by_tests():
    there = {path.name: path for path in (ROOT / "docs" / "screenshots").iterdir()}
    taken = set()
    for path in (ROOT / "tests" / "ui").glob("test_*.py"):
        for name in re.findall(r'\bpicture\(page, f?"([\w{}-]+)"\)', path.read_text("utf-8")):
            themes = ("light", "dark") if "{theme}" in name else ("",)
            taken |= {name.replace("{theme}", theme) + ".png" for theme in themes}
    shown = {Path(target).name for page in PAGES for target in links(page) if "shots/" in target}
    assert len(taken) >= 6
    assert set(there) == taken == shown, "make screenshots"
    assert {name for name, path in there.items() if path.stat().st_size > 150_000} == set()


def test_the_index_of_pages_names_each_once_and_says_what_it_is():
    """docs/llms.txt: for programs that read, and the navigation of the site. llmstxt.org"""
    title, _, summary, *rest = (ROOT / "docs" / "llms.txt").read_text("utf-8").splitlines()
    assert title == "# ddl-airflow" and summary.startswith("> ")
    entries = [line for line in rest if line.startswith("- ")]
    found = [re.fullmatch(r"- \[[^\]]+\]\(([^)]+)\): \S.+", line) for line in entries]
    listed = [(ROOT / "docs" / one[1]).resolve() for one in found if one is not None]
    assert len(listed) == len(entries)
    assert sorted(listed) == sorted([*PAGES, ROOT / "docs" / "manifest.schema.json"])
    assert [line for line in rest if line.startswith("#") and not line.startswith("## ")] == []


def test_the_page_of_commands_says_what_the_parsers_say():
    script = ROOT / "scripts" / "commands_page.py"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path]))}
    said = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, check=True
    ).stdout
    written = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert written == said, "python scripts/commands_page.py > docs/commands.md"
    assert "`--blacklist-cooldown-range S S`" in said
