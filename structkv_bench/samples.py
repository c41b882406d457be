"""A task's samples for one tokenizer, with what tokenising them showed; kept in the user's cache folder.

Making and counting the prompts of a large grid takes minutes, and every resume would do it again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from structkv_bench.errors import UserError
from structkv_bench.paths import cache_folder, write_whole
from structkv_bench.plan import Group
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.task import Sample, Task


@dataclass(frozen=True)
class Prompt:
    """A sample, and what its token ids are like."""

    sample: Sample
    context_tokens: int
    question_tokens: int
    """Fed after the context was compressed; 0 where the question is part of it."""
    digest: str
    """Hash of the ids."""

    @property
    def tokens(self) -> int:
        """Of the whole prompt."""
        return self.context_tokens + self.question_tokens


def prompts_of(group: Group, prompts: TokenizerPrompts) -> list[Prompt]:
    """The samples that a group's cells run on.

    Raises:
        UserError: as for Task.build.
    """
    task, wanted = group.task, group.task.samples
    file = cache_folder() / "samples" / f"{_key(group, prompts)}.jsonl"
    known, complete = _read(file)
    if len(known) >= wanted or complete:
        return known[:wanted]
    made = [_measured(sample, prompts) for sample in task.build(group.subtask, group.length, prompts)]
    with suppress(UserError):  # without a cache the next run makes them again
        _write(file, made, complete=len(made) < wanted)
    return made


def _measured(sample: Sample, prompts: TokenizerPrompts) -> Prompt:
    context, question = prompts.parts(sample)
    return Prompt(sample, len(context), len(question), prompt_hash(context + question))


def prompt_hash(ids: list[int]) -> str:
    """Hash of a prompt's token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def _key(group: Group, prompts: TokenizerPrompts) -> str:
    """Hash of all that the samples come from: settings, texts, tokenizer, and the task's own code."""
    config = group.cells[0].config
    origin = [config["task"], group.subtask, group.length, group.task.sources(group.subtask)]
    told = json.dumps([*origin, prompts.fingerprint, _code_hash(type(group.task))], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:24]


def _code_hash(task: type[Task]) -> str:
    """Of the file that defines a task; in a package, of its generators, templates and word lists too."""
    own = Path(str(sys.modules[task.__module__].__file__))
    files = sorted(own.parent.rglob("*")) if "." in task.__module__ else [own]
    digest = hashlib.sha256()
    for file in files:
        if file.suffix in (".py", ".json"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> tuple[list[Prompt], bool]:
    """Cached prompts, and whether the task has no more than these; none if the file is not as written."""
    with suppress(OSError, ValueError):
        head, _, body = file.read_text(encoding="utf-8").partition("\n")
        if head.startswith(_checksum(body)):
            lines = [json.loads(line) for line in body.splitlines()]
            return [Prompt(_sample(line.pop("sample")), **line) for line in lines], head.endswith("all")
    return [], False


def _sample(fields: dict[str, object]) -> Sample:
    """As it was before JSON made lists of its tuples."""
    return Sample(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})  # type: ignore[arg-type]


def _write(file: Path, made: Iterable[Prompt], complete: bool) -> None:
    body = "".join(json.dumps(asdict(prompt)) + "\n" for prompt in made)
    write_whole(file, f"{_checksum(body)} {'all' if complete else 'some'}\n{body}")


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
