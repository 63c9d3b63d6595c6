"""What MkDocs is told about docs/: navigation, pages from beside it, and links that leave it.

docs/llms.txt is the navigation. README.md and the like become pages of the site. A link to another
file of the repository leads to a copy of it, a link to a folder to the manifest in it. The Markdown
itself goes beside the pages, with llms.txt, for whoever reads that.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "llms.txt"
_SECTION = re.compile(r"^## (.+)$")
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)")
_LINK = re.compile(r"(\]\()((?:\.\./)*[\w./-]+)((?:#[\w-]+)?\))")
# Browsers start no worker from a page that is a file. The search wants one: here it is a frame.
_WORKER = """\
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const said = new MessageEvent("message", { data });
        this.dispatchEvent(said);
        if (this.onmessage) this.onmessage(said);
      };
      inside.importScripts = () => Promise.resolve();
      this.postMessage = (data) => waiting.push(data);
      const script = inside.document.createElement("script");
      script.onload = () => {
        this.postMessage = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        waiting.forEach(this.postMessage);
      };
      script.src = new URL(url, location.href).href;
      inside.document.body.append(script);
    }
    terminate() {}
  };
}
"""


def on_config(config: MkDocsConfig) -> None:
    """Reads the navigation."""
    sections: list[dict[str, list[dict[str, str]]]] = []
    for line in INDEX.read_text("utf-8").splitlines():
        if section := _SECTION.match(line):
            sections.append({section[1]: []})
        elif entry := _ENTRY.match(line):
            ((_, entries),) = sections[-1].items()
            entries.append({entry[1]: _place((INDEX.parent / entry[2]).resolve())})
    config.nav = sections


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that are not in docs/, and the files that pages lead to."""
    files.append(File.generated(config, "iframe-worker.js", content=_WORKER))
    waiting, seen = [*ROOT.glob("*.md"), *INDEX.parent.glob("*.md")], set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.is_relative_to(INDEX.parent):
            files.append(File.generated(config, _place(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            text = path.read_text("utf-8")
            waiting += filter(None, (_there(path, found[2]) for found in _LINK.finditer(text)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository become links of the site."""
    source, folder = Path(page.file.abs_src_path), posixpath.dirname(page.file.src_uri) or "."

    def moved(found: re.Match[str]) -> str:
        there = _there(source, found[2])
        place = found[2] if there is None else posixpath.relpath(_place(there), folder)
        return f"{found[1]}{place}{found[3]}"

    return _LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Leaves the Markdown, and its index, beside the pages."""
    site = Path(config.site_dir)
    for path in [*ROOT.glob("*.md"), *INDEX.parent.glob("*.md")]:
        shutil.copy(path, site / path.name)
    (site / INDEX.name).write_text(INDEX.read_text("utf-8").replace("](../", "]("), "utf-8")


def _there(page: Path, target: str) -> Path | None:
    """The file of the repository that a link leads to: of a folder, the manifest in it."""
    there = (page.parent / target).resolve()
    if there.is_dir():
        there /= "manifest.yml"
    return there if there.is_file() and there.is_relative_to(ROOT) else None


def _place(path: Path) -> str:
    """Where a file of the repository is among those of the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(INDEX.parent):
        return path.relative_to(INDEX.parent).as_posix()
    if path.parent == ROOT and path.suffix == ".md":
        return path.name
    # Browsers show text. What they would take for something else is called so.
    return f"files/{path.relative_to(ROOT).as_posix()}{'' if path.suffix == '.md' else '.txt'}"
