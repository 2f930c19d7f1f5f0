"""What MkDocs calls: adds the pages that follow from the code, and checks that none is missing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tests.site import links, names


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put all pages of a folder in the place of an entry of the menu that ends in /."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(entry: Any, docs: Path) -> Any:
    if isinstance(entry, list):
        return [_expanded(each, docs) for each in entry]
    if isinstance(entry, dict):
        return {title: _expanded(inner, docs) for title, inner in entry.items()}
    if not entry.endswith("/"):
        return entry
    if entry == f"{names.FOLDER}/":
        return list(names.pages())
    pages = (each.relative_to(docs).as_posix() for each in (docs / entry).rglob("*.md"))
    return sorted(pages, key=lambda page: (not page.endswith("index.md"), page))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of public names, and of what pages link to outside docs/."""
    texts = {
        f"{links.DOCS}/{each.src_uri}": Path(each.abs_src_path).read_text(encoding="utf-8")
        for each in files.documentation_pages()
        if each.abs_src_path
    }
    for path, text in names.pages().items():
        files.append(File.generated(config, path, content=text))
    for path, text in links.pages(texts).items():
        inclusion = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, path, content=text, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the site's pages."""
    if page.file.generated_by:
        return markdown
    return links.rewritten(markdown, f"{links.DOCS}/{page.file.src_uri}")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Put a page's own text beside it, to which llms.txt leads."""
    if not page.file.generated_by:
        beside = Path(page.file.abs_dest_path).with_suffix(".md")
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(page.markdown or "", encoding="utf-8")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Every public name and each of its members has one anchor in the built site."""
    folder = Path(config.site_dir) / names.FOLDER
    anchors = Counter(
        found
        for file in folder.rglob("*.html")
        for found in re.findall(r'id="([^"]+)"', file.read_text(encoding="utf-8"))
    )
    wanted = {
        f"{path}.{member}".rstrip(".")
        for entries in names.shown().values()
        for path, members in entries.items()
        for member in ("", *members)
        if not path.endswith(("__version__", *([names.WITHOUT_FIELDS] if member else [])))
    }
    if missing := sorted(wanted - set(anchors)):
        raise PluginError(f"without an anchor in the site: {', '.join(missing)}")
    if repeated := sorted(name for name in wanted if anchors[name] > 1):
        raise PluginError(f"more than once in the site: {', '.join(repeated)}")
