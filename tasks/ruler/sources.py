"""Where the texts lie that RULER's essay and question tasks are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from structkv_bench.errors import UserError
from structkv_bench.paths import expanded

from ..corpus import HubFile, essay_files, read_essays
from .data import SUBTASKS
from .questions import HOTPOT, SQUAD, Questions, read_hotpot, read_squad


@dataclass(frozen=True)
class Sources:
    """The user's settings of Ruler with the same names."""

    essays: str | None
    squad: str | None
    hotpot: str | None

    def files(self, subtask: str) -> dict[str, list[Path]]:
        """The files that a subtask reads, by the name of the setting; found without network or reading.

        Raises:
            UserError: they are not there.
        """
        match SUBTASKS[subtask]["args"]:
            case {"type_haystack": "essay"}:
                return {"essays": essay_files(self.essays, _without(subtask))}
            case {"dataset": "squad"}:
                return {"squad": [_file("squad", self.squad, SQUAD)]}
            case {"dataset": "hotpotqa"}:
                return {"hotpot": [_file("hotpot", self.hotpot, HOTPOT)]}
            case _:
                return {}

    def essay_text(self, subtask: str) -> str:
        """All essays, or nothing where the subtask's haystack is made of something else."""
        if "essays" not in self.files(subtask):
            return ""
        return read_essays(self.essays, _without(subtask))

    def questions(self, subtask: str) -> Questions:
        """The questions of qa_1 or qa_2."""
        [(name, [file])] = self.files(subtask).items()
        return read_squad(file) if name == "squad" else read_hotpot(file)

    def fetch(self, subtask: str) -> list[Path]:
        """Download what a subtask needs from the hub and has no file for; where it lies."""
        match SUBTASKS[subtask]["args"]:
            case {"dataset": "squad"} if self.squad is None:
                return [SQUAD.fetch()]
            case {"dataset": "hotpotqa"} if self.hotpot is None:
                return [HOTPOT.fetch()]
            case _:
                return []


def _file(name: str, setting: str | None, pinned: HubFile) -> Path:
    if setting is None:
        return pinned.cached(
            f"where there is network, run: structkv-bench fetch task=ruler; or set task.{name}=FILE"
        )
    file = expanded(setting)
    if not file.is_file():
        raise UserError(f"task.{name}={setting}: there is no such file")
    return file


def _without(subtask: str) -> str:
    return f"leave {subtask} out of task.subset"
