"""What MkDocs does not do by itself: pages that lie outside docs, links that leave docs, and tables
that are generated from the code.

The site works without a network, so a link to a file of the repository becomes a link to a copy of
it in the site, and a link to a folder one to a list of its files. ``<!-- generated: NAME -->`` in a
page is replaced by the table NAME of generated.py.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import generated

ROOT = Path(__file__).resolve().parents[2]
# Pages of the site that are files of the repository.
PAGES = {
    "CHANGELOG.md": "reference/changes.md",
    "CONTRIBUTING.md": "contributing/contributing.md",
    "benchmarks/README.md": "contributing/benchmarks.md",
}
# What the theme would fetch from elsewhere, and the copy of it in the site.
SHIM, OUR_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
LINK = re.compile(r"(\]\()([^)#\s]+)")


def in_site(path: str) -> str:
    """Where the site has a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"source/{path}.txt")


def linked(text: str, folder: str) -> set[str]:
    """Paths of the repository, outside docs, that a page in this folder links to."""
    targets = {match[2] for match in LINK.finditer(text) if "://" not in match[2]}
    paths = {os.path.normpath(os.path.join(folder, target)) for target in targets}
    return {path for path in paths if not path.startswith("docs/") and (ROOT / path).exists()}


def on_files(files: Any, config: Any) -> Any:
    shim = str(Path(__file__).with_name("iframe-worker.js"))
    files.append(File.generated(config, OUR_SHIM, abs_src_path=shim))
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    paths = set()
    for file in files.documentation_pages():
        page = Path(file.abs_src_path)
        paths |= linked(page.read_text(encoding="utf-8"), os.path.relpath(page.parent, ROOT))
    for path in sorted(paths - PAGES.keys()):
        if (ROOT / path).is_dir():
            inside = sorted((ROOT / path).rglob("*"))
            listing = "\n".join(str(item.relative_to(ROOT)) for item in inside)
            files.append(File.generated(config, in_site(path), content=listing))
        else:
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = os.path.relpath(Path(page.file.abs_src_path).parent, ROOT)
    start = os.path.dirname(page.file.src_uri) or "."

    def moved(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, match[2]))
        if "://" in match[2] or not (ROOT / path).exists():
            return match[0]
        return match[1] + os.path.relpath(in_site(path), start)

    markdown = LINK.sub(moved, markdown)
    return re.sub(r"<!-- generated: (\w+) -->", lambda m: generated.TABLES[m[1]](), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return output.replace(
        SHIM, os.path.relpath(OUR_SHIM, os.path.dirname(page.file.dest_uri) or ".")
    )
