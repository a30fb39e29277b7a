"""Document values of a row's field: a text, or the messages of a conversation."""

from __future__ import annotations

from typing import Any


def checked_value(value: Any) -> Any:
    """Return a document's text, or its messages, of which each has its content as one text.

    The content of a message may be a list of parts, such as `{"type": "text", "text": "hello"}`;
    they are joined.

    Raises:
        ValueError: it is not a document; the message continues a sentence that begins with the
            field.
    """
    if value is None:
        raise ValueError("is null")
    if not isinstance(value, str | list):
        raise ValueError(f"is of type {type(value).__name__}, neither text nor a list of messages")
    if not value:
        raise ValueError("is empty")
    if isinstance(value, str):
        check_text(value)
        return value
    return [_message(message, f"in message {number}") for number, message in enumerate(value, 1)]


def check_text(text: str) -> None:
    """Raise ValueError if a text cannot be encoded as UTF-8: it has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"has half of a surrogate pair ({half}) at character {error.start:,}"
        ) from None


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with its content as one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"has no role that is text {where}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"has no content that is text {where}")
    for text in (message["role"], content):
        try:
            check_text(text)
        except ValueError as error:
            raise ValueError(f"{error} {where}") from None
    return {**message, "content": content}


def _part(part: Any, where: str) -> str:
    """Return the text of a part of a message's content."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise ValueError(f"has a part of type {kind!r} {where}; only text can be learned")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"has a part without text {where}")
    return text
