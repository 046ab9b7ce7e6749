"""What store to open. Knows nothing of LMCache's code, only what its URLs must look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from droidkv.errors import StorageError, unknown_name

_FORMS = {
    "fs": "fs:///absolute/folder",
    "lm": "lm://host:port",
    "redis": "redis://host:port",
    "rediss": "rediss://host:port",
    "unix": "unix:///socket",
}
REMOTE_SCHEMES = tuple(_FORMS)
_REDIS_SCHEMES = ("redis", "rediss", "unix")
# A stalled server fails a call after this long instead of never.
SOCKET_SECONDS = 5.0
# A process writes into a folder of its own, so named, in that of `fs://`.
WRITING_PREFIX = ".writing-"


@dataclass(frozen=True)
class LMCacheSettings:
    """What to open.

    Attributes:
        remote_url: `fs:///folder`, `redis://host:port`, `rediss://...`, `unix:///socket` or
            `lm://host:port`; None = only this process reads what it stores.
        chunk_tokens: Tokens in one chunk; the same for all who share a store.
        max_local_cpu_gib: Memory of this process for objects, taken at once. Whatever is read or
            written goes through it, so it must hold many objects.
        keep_local: Keep what was stored or read in that memory, evicting the least recently used.
        local_disk: Folder of this process's disk tier; None = none.
        max_local_disk_gib: Largest size of the disk tier.
        put_seconds: How long storing may wait for earlier objects to leave before it gives up.

    Raises:
        StorageError: A setting is out of range, or no backend has such a URL.
    """

    remote_url: str | None = None
    chunk_tokens: int = 256
    max_local_cpu_gib: float = 1.0
    keep_local: bool = True
    local_disk: Path | None = None
    max_local_disk_gib: float = 1.0
    put_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.remote_url is not None:
            if self.scheme not in REMOTE_SCHEMES:
                raise StorageError(
                    unknown_name("scheme of a remote_url", self.scheme, REMOTE_SCHEMES)
                )
            form = _FORMS[self.scheme]
            if not _has_form(self.scheme, urlsplit(self.remote_url)):
                raise StorageError(f"expected {form}, got {self.remote_url!r}")
        if self.max_local_cpu_gib <= 0 or self.max_local_disk_gib <= 0 or self.put_seconds < 0:
            raise StorageError(
                f"expected max_local_cpu_gib > 0, max_local_disk_gib > 0 and put_seconds >= 0, "
                f"got {self.max_local_cpu_gib}, {self.max_local_disk_gib} and {self.put_seconds}"
            )

    @classmethod
    def parse(cls, address: str, chunk_tokens: int) -> LMCacheSettings:
        """Read a remote URL, or `local://` for none; options of this process follow a `?`.

        The options: `cpu_gib`, `keep_local` (0 or 1), `disk` (a folder), `disk_gib`,
        `put_seconds`. Others stay in the URL, for the backend: `redis://host:6379/0?cpu_gib=2`.

        Raises:
            StorageError: A value is not of its kind or out of range.
        """
        parts = urlsplit(address)
        kinds: dict[str, tuple[str, Callable[[str], Any]]] = {
            "cpu_gib": ("max_local_cpu_gib", float),
            "keep_local": ("keep_local", lambda text: bool(int(text))),
            "disk": ("local_disk", Path),
            "disk_gib": ("max_local_disk_gib", float),
            "put_seconds": ("put_seconds", float),
        }
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        fields: dict[str, Any] = {}
        for name in kinds.keys() & options.keys():
            field, kind = kinds[name]
            try:
                fields[field] = kind(options.pop(name))
            except ValueError as cause:
                raise StorageError(f"{address}: expected a number for {name} ({cause})") from cause
        url = _url(parts, options)
        return cls(None if parts.scheme == "local" else url, chunk_tokens, **fields)

    @property
    def scheme(self) -> str:
        """Scheme of the remote URL, empty without one."""
        return urlsplit(self.remote_url or "").scheme

    @property
    def lmcache_url(self) -> str | None:
        """The remote URL as LMCache wants it: Redis with time-outs, `fs://` with a host."""
        if self.remote_url is None:
            return None
        parts = urlsplit(self.remote_url)
        if self.scheme == "fs":
            return f"fs://localhost:0{parts.path}"
        if self.scheme in _REDIS_SCHEMES:
            options = {
                "socket_timeout": str(SOCKET_SECONDS),
                "socket_connect_timeout": str(SOCKET_SECONDS),
            }
            options |= dict(parse_qsl(parts.query))
            return _url(parts, options)
        return self.remote_url


def _has_form(scheme: str, parts: SplitResult) -> bool:
    if scheme in ("fs", "unix"):  # what follows two slashes would be taken for a host
        return parts.netloc == "" and parts.path.startswith("/")
    try:
        port = parts.port
    except ValueError:  # none that there is
        return False
    return parts.hostname is not None and (port is not None or scheme != "lm")


def _url(parts: SplitResult, options: Mapping[str, str]) -> str:
    # `geturl` would write `unix:/socket` for `unix:///socket`.
    query = f"?{urlencode(options)}" if options else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path}{query}"
