"""The settings of the HTTP side, made from those of the process, and made again while it runs.

Owns which settings a running server takes anew: keys, limits, time-outs, origins and the level of its log. The rest
shapes what is loaded or listens, and waits for a restart. Invariant: what cannot be read changes nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from expertserve import log
from expertserve.config import SETTINGS, Settings, resolve
from expertserve.errors import ConfigError, ExpertServeError
from expertserve.server.state import ServerSettings, ServerState

RELOADED = (
    "api_key",
    "api_key_file",
    "key_limit",
    "cors_origin",
    "max_queue",
    "queue_timeout",
    "request_timeout",
    "max_body",
    "drain_timeout",
    "log_level",
)
_log = log.get_logger(__name__)


def server_settings(settings: Settings) -> ServerSettings:
    """Raises ConfigError where the keys cannot be read."""
    return ServerSettings(
        host=settings.host,
        port=settings.port,
        api_keys=(*(key.strip() for key in settings.api_key), *keys_of(settings.api_key_file)),
        key_limit=settings.key_limit,
        cors_origins=settings.cors_origin,
        max_sequences=settings.parallel + settings.max_queue,
        queue_timeout_s=settings.queue_timeout or math.inf,
        request_timeout_s=settings.request_timeout or math.inf,
        max_body_bytes=settings.max_body,
        drain_timeout_s=settings.drain_timeout,
    )


def keys_of(file: Path | None) -> list[str]:
    """The keys in a file, one a line; a comment begins with # at a line's start or after a space."""
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from None
    keys = [key for line in lines if (key := re.sub(r"(^|\s)#.*", "", line).strip())]
    if not keys:
        raise ConfigError(f"--api-key-file {file}: has no key; without this option no key is needed")
    return keys


class Reloader:
    """Called on SIGHUP: reads the files again, of settings and of keys; flags and environment are as they were."""

    def __init__(self, settings: Settings, state: ServerState) -> None:
        self._settings = settings
        self._state = state

    def __call__(self) -> None:
        try:
            found = resolve(self._settings.flags)
            new = replace(self._settings, **{name: getattr(found, name) for name in RELOADED})
            fresh = server_settings(new)
        except ExpertServeError as error:
            _log.error(f"the settings stay as they are: {error}")
            return
        changed = self._changed(new)
        waiting = [name for name in self._changed(replace(found, device=new.device)) if name not in changed]
        if self._state.settings.api_keys and not fresh.api_keys:
            _log.warning("there are no API keys any more: whoever reaches the server can use it", host=new.host)
        self._settings = new
        self._state.settings = fresh
        if "log_level" in changed:
            log.configure(new.log_format, new.log_level)
        _log.info("settings read again", changed=changed, keys=len(fresh.api_keys))
        if waiting:
            _log.warning("these settings have changed and need a restart", settings=waiting)

    def _changed(self, new: Settings) -> list[str]:
        return [name for name in SETTINGS if getattr(new, name) != getattr(self._settings, name)]
