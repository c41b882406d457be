"""Where a data set's files come from: the hub's cache, a folder or a zip; and what their lines hold."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile, ZipFile

from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.paths import expanded

from ..corpus import HubFile

T = TypeVar("T")


@dataclass(frozen=True)
class File:
    """Bytes of a file, and what to call it."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        """Of its bytes."""
        return hashlib.sha256(self.data).hexdigest()

    def text(self) -> str:
        """Its text.

        Raises:
            UserError: it is not UTF-8, or there is nothing in it.
        """
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            raise UserError(f"{self.name}: line {line}: not UTF-8 text") from None
        if not text.strip():
            raise UserError(f"{self.name}: the file is empty")
        return text

    def json_lines(self) -> Iterator[Record]:
        """Its lines as objects; blank ones are skipped.

        Raises:
            UserError: as `text`, or a line is not a JSON object.
        """
        # Not splitlines(), which also splits at separators that may stand inside a JSON string.
        for number, line in enumerate(self.text().split("\n"), 1):
            if line.strip():
                where = f"{self.name}: line {number}"
                yield record(parse(line, where), where)


@dataclass(frozen=True)
class Record:
    """A JSON object, and where it stands."""

    where: str
    values: dict[str, Any]

    def text(self, field: str) -> str:
        """A field that must be text."""
        return self._checked(field, str, "text")

    def prose(self, field: str) -> str:
        """A field that must be text for a tokenizer, which takes no half of a surrogate pair."""
        try:
            self.text(field).encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{self.where}: {field} is not valid Unicode (half a surrogate pair)") from None
        return self.text(field)

    def number(self, field: str) -> int:
        """A field that must be a whole number."""
        return self._checked(field, int, "a whole number")

    def texts(self, field: str) -> list[str]:
        """A field that must be a list of texts."""
        values = self._checked(field, list, "a list of texts")
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{self.where}: {field} must be a list of texts, and not all of it is text")
        return values

    def _checked(self, field: str, kind: type[T], wanted: str) -> T:
        if field not in self.values:
            raise UserError(f"{self.where}: no field {field}")
        value = self.values[field]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{self.where}: {field} must be {wanted}, not {type(value).__name__}")
        return value


def parse(text: str, where: str) -> Any:
    """What a JSON text holds.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({kind_and_line(error)})") from None


def record(value: Any, where: str) -> Record:
    """A JSON value as a record.

    Raises:
        UserError: it is not an object.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: must be a JSON object, not {type(value).__name__}")
    return Record(where, value)


def unique(ids: Iterable[tuple[str, str]]) -> None:
    """Refuse an id that comes twice.

    Args:
        ids: each with where it stands.

    Raises:
        UserError: one does.
    """
    first: dict[str, str] = {}
    for id, where in ids:
        if id in first:
            raise UserError(f"{where}: id {id!r} is also that of {first[id]}")
        first[id] = where


def read(source: str | None, hub: HubFile, fetch: str, member: str) -> File:
    """A data set's file: `member` of a folder or a zip, or of its folder data/.

    Args:
        source: folder, or a copy of the hub's file; None: what was fetched from the hub.
        hub: the hub's zip, or the file itself.
        fetch: the command that brings it into the cache.
        member: name of the file.

    Raises:
        UserError: it is not there, or can't be read.
    """
    path, name = _place(source, hub, fetch)
    try:
        if path.is_dir():
            found = next((path / p for p in _places(member) if (path / p).is_file()), None)
            if found is None:
                raise UserError(f"no {member} in {path} or its folder data")
            return File(str(found), found.read_bytes())
        if hub.file == member:
            return File(name, path.read_bytes())
        return _from_zip(path, name, member)
    except OSError as error:
        raise UserError(f"{name}: can't be read ({kind_and_line(error)})") from error


def absent(source: str | None, hub: HubFile, fetch: str, members: Iterable[str]) -> dict[str, str]:
    """Which members are not there, each with the reason; nothing of them is read. Arguments as of `read`.

    Raises:
        UserError: a given source does not exist, or is a damaged zip.
    """
    if source is None:
        try:
            _place(source, hub, fetch)
        except UserError as error:
            return dict.fromkeys(members, str(error))
    path, name = _place(source, hub, fetch)
    if not path.exists():
        raise UserError(f"{name}: no such file or folder")
    if path.is_dir():
        there = {str(file.relative_to(path)) for file in (*path.glob("*"), *path.glob("data/*"))}
    elif path.suffix == ".zip" or hub.file.endswith(".zip"):
        there = _names(path, name)
    else:
        return {}
    return {m: f"no {m} in {name}" for m in members if not there.intersection(_places(m))}


def _place(source: str | None, hub: HubFile, fetch: str) -> tuple[Path, str]:
    """Where the data set lies, and what to call that."""
    if source is not None:
        return expanded(source), str(expanded(source))
    path = hub.cached(f"where there is network, run: {fetch}; or set task.source to a local copy")
    return path, f"{hub.repository}@{hub.revision}/{hub.file}"


def _names(path: Path, name: str) -> set[str]:
    try:
        with ZipFile(path) as archive:
            return set(archive.namelist())
    except (BadZipFile, OSError) as error:
        raise UserError(f"{name}: not a zip that can be read ({kind_and_line(error)})") from error


def _from_zip(path: Path, name: str, member: str) -> File:
    try:
        with ZipFile(path) as archive:
            found = next((p for p in _places(member) if p in archive.namelist()), None)
            if found is None:
                raise UserError(f"{name}: no {member} in the zip or its folder data")
            return File(f"{name}/{found}", archive.read(found))
    # What zipfile raises at damage, unknown compression and encryption
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{name}: not a zip that can be read ({kind_and_line(error)})") from error


def _places(member: str) -> tuple[str, str]:
    return member, f"data/{member}"
