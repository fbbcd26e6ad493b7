"""GRUYERE_CONF: converts settings given as keywords or options to its format and has the library
check them. The library and child processes read them from the environment."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from .._errors import GruyereError
from . import library

VARIABLE = "GRUYERE_CONF"


def checked(keywords: Mapping[str, object]) -> str:
    """The environment's settings followed by `keywords`, in the format of GRUYERE_CONF. The later
    value of a key counts.

    Raises GruyereError with the library's message if it would refuse them. The message names the
    key, the value and what is allowed.
    """
    given = [f"{key}:{value(key, chosen)}" for key, chosen in keywords.items()]
    whole = ",".join(part for part in (os.environ.get(VARIABLE, ""), *given) if part)
    check(whole)
    return whole


def check(settings: str) -> None:
    """Raise GruyereError if the library would refuse `settings`."""
    message = ctypes.create_string_buffer(8192)
    if "\0" in settings:
        raise GruyereError(f"{VARIABLE}: a value contains a NUL character: {settings!r}")
    try:
        text = settings.encode()
    except UnicodeEncodeError:
        # How Python keeps what is not UTF-8 in the environment.
        raise GruyereError(f"{VARIABLE}: not valid UTF-8: {settings!r}") from None
    if library.load().gruyere_check_configuration(text, message, len(message)) != 0:
        raise GruyereError(message.value.decode(errors="replace"))


def keys(settings: str) -> set[str]:
    """The keys in `settings`."""
    return set(entries(settings))


def entries(settings: str) -> dict[str, str]:
    """`settings` by key, as the library reads them: the later value of a key counts."""
    pairs = (entry.partition(":") for entry in settings.split(",") if entry.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def value(key: str, chosen: object) -> str:
    """`chosen` in the format of GRUYERE_CONF. Raises GruyereError if it has a comma."""
    if isinstance(chosen, bool):
        return "on" if chosen else "off"
    if chosen is None:
        return "none"
    text = os.fspath(chosen) if isinstance(chosen, os.PathLike) else str(chosen)
    if "," in text:
        raise GruyereError(
            f"{key}={chosen!r}: a value cannot contain a comma, which separates settings; pass "
            "each key as its own keyword"
        )
    return text
