"""What mkdocs does besides its settings (`hooks` in mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    r"""Remove the backslash of `\|` in tables: GitHub needs it in code there, Python-Markdown shows it."""
    return re.sub(r"<td\b.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.DOTALL)
