"""Elements of HTML and SVG, in which everything that is not markup already is escaped."""

from __future__ import annotations

import html
from typing import Any

__all__ = ["Markup", "element", "raw"]

_VOID = ("meta", "link", "input", "line", "circle", "rect")


class Markup(str):
    """Text that is markup, and is not escaped again."""

    __slots__ = ()


def raw(text: str) -> Markup:
    """zoo's own style or script, as it is. ValueError for one that would end its element."""
    if "</" in text:
        raise ValueError("raw: '</' would end the element that holds the text")
    return Markup(text)


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. ``class_`` and ``http_equiv`` are written ``class`` and ``http-equiv``; other text is escaped."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
    )
    if name in _VOID:
        return Markup(f"<{name}{words}>" if name in _VOID[:3] else f"<{name}{words}/>")
    inner = "".join(child if isinstance(child, Markup) else html.escape(str(child)) for child in children)
    return Markup(f"<{name}{words}>{inner}</{name}>")
