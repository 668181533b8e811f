r"""Finds the answer that a text puts into `\boxed{}`."""

import re

_BOX_TOKEN = re.compile(r"\\boxed\s*\{|\\[{}\\]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{}`, without spaces around it, or None; linear in the text.

    Of boxes directly within each other, the innermost. A box that is never closed is none.
    """
    open_braces: list[re.Match[str] | None] = []
    box_begin, box_end, content = -1, -1, slice(0)
    for token in _BOX_TOKEN.finditer(text):
        mark = token.group()
        if mark in ("\\\\", "\\{", "\\}"):
            continue
        if mark != "}":
            open_braces.append(token if mark != "{" else None)
        elif open_braces and (box := open_braces.pop()) is not None:
            has_box = box.end() <= box_begin
            if not has_box or (text[box.end() : box_begin] + text[box_end : token.start()]).strip():
                content = slice(box.end(), token.start())
            box_begin, box_end = box.start(), token.end()
    return text[content].strip() if box_begin >= 0 else None
