"""Files that are written whole or not at all, and read within bounds. Standard library only."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from droidkv.errors import DroidKVError, StorageError

MAX_JSON_BYTES = 256 * 1024 * 1024
MAX_TOML_BYTES = 64 * 1024
MAX_TOML_LINE = 4096  # tomllib is quadratic in the parts of a dotted key
MAX_DEPTH = 32

# A string, a bracket, or a constant that Python's json accepts and JSON does not have. The
# possessive repeat keeps the scan linear on an unterminated string full of escaped quotes.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]|-?Infinity|NaN', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

_WAYS_OUT = {
    errno.ENOSPC: "the disk is full: free some space, or write to another folder",
    errno.EDQUOT: "the disk quota is used up: free some space, or write to another folder",
    errno.EACCES: "there is no permission to write: choose a folder that you own",
    errno.EPERM: "there is no permission to write: choose a folder that you own",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EEXIST: "a part of the path is a file, not a folder: choose another path",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another path",
    errno.ENAMETOOLONG: "the name is too long for this file system: choose a shorter one",
}


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes `path`'s place in one step.

    Whatever is raised inside, Ctrl-C and a full disk included, the old file is still whole and
    the temporary one is gone. Missing parent folders are made. Also for writers that want a path
    instead of bytes, such as safetensors.

    Raises:
        StorageError: The file system refused; the message says what to do.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:80]}.{secrets.token_hex(8)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        yield temporary
        _flush(temporary)
        os.chmod(temporary, mode)  # the writer may have put a private file in its place
        os.replace(temporary, target)
        with suppress(OSError):  # not every file system lets a folder be flushed
            _flush(target.parent)
    except Exception as error:
        number = _refusal(error)
        if number is None:
            raise
        raise _storage_error(path, error, number) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Say what to do when the file system refuses what a library writes into a folder.

    Raises:
        StorageError: It did; what the library had half written is still there.
    """
    try:
        yield
    except Exception as error:
        number = _refusal(error)
        # torch.save says neither what failed nor why, only where its own code noticed.
        if "inline_container" in str(error) and not os.statvfs(folder).f_bavail:
            number = errno.ENOSPC
        if number is None or number not in _WAYS_OUT:
            raise
        raise _storage_error(folder, error, number) from error


def _refusal(error: Exception) -> int | None:
    """The system's number of what it answered to a write; None = this is no such answer."""
    if isinstance(error, DroidKVError):
        return None
    if "No space left on device" in str(error):  # safetensors has its own exception type
        return errno.ENOSPC
    return error.errno if isinstance(error, OSError) else None


def _storage_error(path: str | os.PathLike[str], error: Exception, number: int) -> StorageError:
    advice = _WAYS_OUT.get(number, "check the folder and its disk, then try again")
    return StorageError(
        f"expected to write {str(path)!r}, but the system answered: {error}; {advice}. "
        f"What was there before is unchanged."
    )


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text to `path` in one step.

    Raises:
        StorageError: The file system refused; the old file is still whole.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """Write `value` as JSON in one step; NaN and infinities are refused before anything is written.

    Raises:
        StorageError: The file system refused; the old file is still whole.
        ValueError: `value` holds a number that JSON does not have.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False) + "\n")


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII only. What digests are made of.

    Raises:
        ValueError: `value` holds NaN or an infinity.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def read_json(
    path: str | os.PathLike[str],
    error: type[DroidKVError],
    max_bytes: int = MAX_JSON_BYTES,
    max_depth: int = MAX_DEPTH,
) -> Any:
    """Read a JSON file that may be truncated or hostile.

    Args:
        path: The file.
        error: Class of the exception for everything that is wrong with the content.
        max_bytes: Largest size that is read at all.
        max_depth: Deepest nesting of arrays and objects.

    Raises:
        DroidKVError: Of class `error`: no such file, too large, not UTF-8, not JSON, NaN or an
            infinity, a key twice in one object, nested too deeply. Names file and position.
        StorageError: The file could not be read.
    """
    return parse_json(_read_text(path, error, max_bytes), str(path), error, max_depth)


def parse_json(
    text: str,
    where: str,
    error: type[DroidKVError],
    max_depth: int = MAX_DEPTH,
    first_line: int = 1,
) -> Any:
    """`read_json` for a text that was read already.

    Args:
        text: The text.
        where: Names it in messages.
        error: As `read_json`.
        max_depth: As `read_json`.
        first_line: Number of its first line in what `where` names.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: expected each key once in an object, got {twice!r} twice")
        return table

    def finite(digits: str) -> float:
        number = float(digits)
        if number in (float("inf"), float("-inf")):
            raise error(f"{where}: expected numbers that a float can hold, got {digits[:40]}")
        return number

    _check_json_tokens(text, where, error, max_depth, first_line)
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as cause:
        line = cause.lineno + first_line - 1
        raise error(
            f"{where}, line {line}, column {cause.colno}: expected JSON, got something else "
            f"({cause.msg}); the file is truncated or not JSON: restore or remake it"
        ) from cause
    except UnicodeEncodeError as cause:
        raise error(f"{where}: expected Unicode text, got a lone surrogate in a string") from cause
    except ValueError as cause:  # an integer of thousands of digits
        if isinstance(cause, DroidKVError):
            raise
        raise error(f"{where}: expected numbers of a sensible length ({cause})") from cause
    return value


def read_toml(
    path: str | os.PathLike[str],
    error: type[DroidKVError],
    max_bytes: int = MAX_TOML_BYTES,
    max_depth: int = MAX_DEPTH,
) -> dict[str, Any]:
    """Read a TOML file that may be truncated or hostile. As `read_json`.

    Raises:
        DroidKVError: Of class `error`: what `read_json` refuses, for TOML.
        StorageError: The file could not be read.
    """
    text = _read_text(path, error, max_bytes)
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_TOML_LINE:
            raise error(
                f"{path}, line {number}: expected at most {MAX_TOML_LINE} characters, "
                f"got {len(line)}; break the line"
            )
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:  # its message ends with line and column
        raise error(f"{path}: expected TOML, got something else: {cause}") from cause
    except RecursionError as cause:
        raise error(f"{path}: expected at most {max_depth} nested levels, got far more") from cause
    _check_toml_values(table, str(path), error, max_depth)
    return table


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Lower-case hexadecimal SHA-256 of a file's bytes.

    Raises:
        StorageError: The file could not be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as cause:
        raise StorageError(f"expected to read {str(path)!r}, but: {cause}") from cause


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_text(path: str | os.PathLike[str], error: type[DroidKVError], max_bytes: int) -> str:
    try:
        # Before opening: opening a named pipe would wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise error(f"{path}: expected a regular file, got a folder, pipe or device")
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError) as cause:
        raise error(f"{path}: expected a file, but there is none; check the path") from cause
    except OSError as cause:
        raise StorageError(f"expected to read {str(path)!r}, but: {cause}") from cause
    if len(data) > max_bytes:
        raise error(f"{path}: expected at most {max_bytes} bytes, got more; it is not such a file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(
            f"{path}, byte {cause.start}: expected UTF-8 text, got the byte "
            f"0x{data[cause.start]:02x}; the file is damaged or of another kind"
        ) from cause


def _check_json_tokens(
    text: str, where: str, error: type[DroidKVError], max_depth: int, first_line: int
) -> None:
    def fail(position: int, message: str) -> NoReturn:
        line = text.count("\n", 0, position) + first_line
        column = position - text.rfind("\n", 0, position)
        raise error(f"{where}, line {line}, column {column}: {message}")

    depth = 0
    for token in _JSON_TOKEN.finditer(text):
        match token.group()[0]:
            case "[" | "{":
                depth += 1
                if depth > max_depth:
                    fail(token.start(), f"expected at most {max_depth} nested levels, got more")
            case "]" | "}":
                depth -= 1
            case "N" | "I" | "-":
                fail(token.start(), f"expected a finite number, got {token.group()}")


def _check_toml_values(
    table: dict[str, Any], where: str, error: type[DroidKVError], max_depth: int
) -> None:
    open_values: list[tuple[str, Any, int]] = [("", table, 1)]
    while open_values:
        name, value, depth = open_values.pop()
        if depth > max_depth:
            raise error(f"{where}: expected at most {max_depth} nested levels, got more")
        if isinstance(value, dict):
            open_values += [(f"{name}.{key}", each, depth + 1) for key, each in value.items()]
        elif isinstance(value, list):
            open_values += [(name, each, depth + 1) for each in value]
        elif isinstance(value, float) and (
            value != value or value in (float("inf"), -float("inf"))
        ):
            raise error(f"{where}: expected a finite number for {name[1:]!r}, got {value}")
