"""`mode=`, which there is no more: accepted in this release, with a warning that says what to write
in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Optional

from . import _settings
from ._errors import GruyereError, warn_once

NAMES = ("direct", "behind")

_DIRECT = (
    "{said}: Gruyère always serves every tensor itself, so leave it out; the next release does "
    "not know it"
)
_BEHIND = (
    "{said}: torch's own allocator is not put in front of Gruyère any more. The native door has "
    "more of what that was for, and is asked for in its place: say door:native instead "
    '(GRUYERE_CONF=door:native, --door native, gruyere.enable(door="native")); the next release '
    "does not know this any more"
)


def meant(mode: Optional[str], said: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings that `mode`, which the user has `said` so, and `settings` stand for now.

    Raises GruyereError where there never was such a mode.
    """
    if mode is None:
        return dict(settings)
    if mode == "direct":
        warn_once(_DIRECT.format(said=said))
        return dict(settings)
    if mode != "behind":
        raise GruyereError(
            f"{said}: there are no modes; leave it out (door:native asks for torch's own interface)"
        )
    warn_once(_BEHIND.format(said=said))
    chosen = _settings.keys(os.environ.get(_settings.VARIABLE, "")) | set(settings)
    return dict(settings) if "door" in chosen else {**settings, "door": "native"}
