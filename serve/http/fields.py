"""Types of fields that several request formats share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictStr


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the text is empty")
    return _encodable(text)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair") from None
    return text


def _number(value: Any) -> Any:
    """JSON has one type of number, so 10.0 is allowed for 10. Strings and booleans are not numbers."""
    if isinstance(value, (bool, str)):
        raise ValueError("input should be a valid integer")
    return value


FilledText = Annotated[
    StrictStr, AfterValidator(_not_blank), Field(json_schema_extra={"pattern": r"\S"})
]
Text = Annotated[StrictStr, AfterValidator(_encodable)]
Integer = Annotated[int, BeforeValidator(_number)]
# The bound must stand before the validator, or OpenAPI does not show it.
Count = Annotated[int, Field(ge=1), BeforeValidator(_number)]
