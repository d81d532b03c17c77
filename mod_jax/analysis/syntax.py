"""What each byte of a Python file is to Python: part of a keyword, a name, a string and so on."""

import io
import keyword
import tokenize

import numpy as np

CLASSES = ("keyword", "name", "number", "string", "comment", "operator", "space")
UNKNOWN = -1  # of a file, or a part of it, that is not Python
_BY_TYPE = {
    tokenize.NUMBER: "number",
    tokenize.STRING: "string",
    tokenize.COMMENT: "comment",
    tokenize.OP: "operator",
    **{  # f-strings have tokens of their own from Python 3.12 on
        getattr(tokenize, name): "string"
        for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
        if hasattr(tokenize, name)
    },
}


def classes_of_bytes(text: bytes) -> np.ndarray:
    """int8 [len(text)]: an index into `CLASSES` for each byte, or UNKNOWN.

    What no token covers is space: blanks, line ends, indentation, and the mark of a continued line.
    """
    try:
        lines = text.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return np.full(len(text), UNKNOWN, np.int8)
    starts = np.cumsum([0, *(len(line.encode()) for line in lines)])

    def offset(place: tuple[int, int]) -> int:
        row, column = place
        return len(text) if row > len(lines) else int(starts[row - 1]) + len(lines[row - 1][:column].encode())

    classes = np.full(len(text), CLASSES.index("space"), np.int8)
    end = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(lines), newline="").readline):
            name = _BY_TYPE.get(token.type)
            if token.type == tokenize.NAME:
                name = "keyword" if keyword.iskeyword(token.string) else "name"
            if name is not None:
                end = offset(token.end)
                classes[offset(token.start) : end] = CLASSES.index(name)
    except (tokenize.TokenError, SyntaxError):
        classes[end:] = UNKNOWN
    return classes
