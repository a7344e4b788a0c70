"""MkDocs' view of the pages: links that leave docs/ are checked here, and shown as plain names.

In the repository they lead to files; the site has no copy of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page without links out of docs/; PluginError if one of them is dead."""
    here = Path(page.file.abs_src_path).parent

    def shown(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs") and not target.is_dir():
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_path}: the link to {link[2]} leads nowhere")
        return link[1]

    return LINK.sub(shown, markdown)
