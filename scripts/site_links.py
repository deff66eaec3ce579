"""mkdocs hook: links from pages to files outside docs/ lead to the repository.

Without `repo_url` (the environment variable FLYER_REPOSITORY_URL) they become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

__all__ = ["on_page_markdown"]

_LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """The page with every link out of docs/ replaced."""
    docs = Path(config.docs_dir).resolve()
    folder = Path(page.file.abs_src_path or docs).parent

    def outside(link: re.Match[str]) -> str:
        text, target, _anchor = link.groups()
        path = (folder / target).resolve()
        if path.is_relative_to(docs) and path.is_file():
            return link.group(0)
        root = Path(config.config_file_path).parent
        if not path.exists() or not path.is_relative_to(root):
            return link.group(0)  # mkdocs reports it
        if path.is_relative_to(docs) and (path / "index.md").is_file():
            return f"[{text}]({target.rstrip('/')}/index.md)"
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path.relative_to(root)})"

    return _LINK.sub(outside, markdown)
