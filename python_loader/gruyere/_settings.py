"""GRUYERE_CONF: settings given as keywords or options are checked by the library, and left in the
environment, where the library and child processes read them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from . import _library
from ._errors import GruyereError

VARIABLE = "GRUYERE_CONF"


def checked(keywords: Mapping[str, object]) -> str:
    """The environment's settings and then `keywords` (the later value of a key counts), as
    GRUYERE_CONF writes them.

    Raises GruyereError with the library's words, where it would refuse them: the key, the value,
    what would be right.
    """
    given = [f"{key}:{value(key, chosen)}" for key, chosen in keywords.items()]
    whole = ",".join(part for part in (os.environ.get(VARIABLE, ""), *given) if part)
    check(whole)
    return whole


def check(settings: str) -> None:
    """Raises GruyereError where the library would refuse `settings`."""
    message = ctypes.create_string_buffer(8192)
    if "\0" in settings:
        raise GruyereError(f"{VARIABLE}: a value has a NUL character: {settings!r}")
    if (
        _library.library().gruyere_check_configuration(settings.encode(), message, len(message))
        != 0
    ):
        raise GruyereError(message.value.decode(errors="replace"))


def keys(settings: str) -> set[str]:
    """The keys that `settings` names."""
    return set(entries(settings))


def entries(settings: str) -> dict[str, str]:
    """`settings` by key, as the library reads them: of a key that is named twice the later value
    counts."""
    pairs = (entry.partition(":") for entry in settings.split(",") if entry.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def value(key: str, chosen: object) -> str:
    """`chosen` as GRUYERE_CONF writes it. Raises GruyereError where it cannot be written."""
    if isinstance(chosen, bool):
        return "on" if chosen else "off"
    if chosen is None:
        return "none"
    text = os.fspath(chosen) if isinstance(chosen, os.PathLike) else str(chosen)
    if "," in text:
        raise GruyereError(
            f"{key}={chosen!r}: a value cannot have a comma, it separates settings; give each "
            "key as a keyword of its own"
        )
    return text
