"""What comes from a file, as text in HTML."""

from __future__ import annotations

import html
from typing import Any


def escape(value: Any) -> str:
    """The value's text, escaped for an element or a quoted attribute.

    Reports may come from strangers, so nothing of theirs goes into a page without it.
    """
    return html.escape(str(value))
