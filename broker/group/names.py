"""Names of groups: any text, as long as a file can be named after it."""

from __future__ import annotations

from urllib.parse import quote, unquote

from broker.errors import InvalidGroupName

# A file name has 255 bytes at most, and the lock's has a prefix.
_ENCODED_LENGTH_MAX = 240


def encode(name: str) -> str:
    """Return the file name of a group: UTF-8, all but letters, digits and `_ - ~ .` as %XX."""
    if not isinstance(name, str):
        raise InvalidGroupName(str(name), f"is of type {type(name).__name__}, not text")
    if not name:
        raise InvalidGroupName(name, "is empty")
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidGroupName(name, "is not text that UTF-8 can hold") from None
    if encoded.startswith("."):
        # Neither a directory's own name, nor that of a file in the making.
        encoded = "%2E" + encoded[1:]
    if len(encoded) > _ENCODED_LENGTH_MAX:
        raise InvalidGroupName(name, f"has {len(encoded)} bytes when percent-encoded")
    return encoded


def decode(encoded: str) -> str:
    return unquote(encoded)
