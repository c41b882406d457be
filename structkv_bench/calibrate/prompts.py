"""Calibration prompts as token ids, with the places that a measurement asks for; and answers to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from structkv_bench.engine.decode import decode
from structkv_bench.engine.method import Compressor
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError
from structkv_bench.prompts import TokenizerPrompts

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

OWN = "own"
"""Name of the texts that come with the package (corpus.py)."""
ANSWERS = ("generated", "forced")
"""The model's own greedy answers, or the right ones put into its mouth."""


@dataclass(frozen=True)
class Laid:
    """A rendered prompt, and where the marked pieces of its text are."""

    ids: list[int]
    spans: dict[str, list[range]]
    """By mark, in order."""


def laid(prompts: TokenizerPrompts, pieces: Iterable[tuple[str, str]], answer_prefix: str = "") -> Laid:
    """A user turn of pieces (text, mark) in the chat template; pieces whose mark is "" are not noted.

    Each piece is tokenised by itself, so that its place in the prompt is exact.
    """
    ids: list[int] = []
    places: list[tuple[str, int, int]] = []
    for text, mark in pieces:
        start = len(ids)
        ids += prompts.encode(text)
        if mark:
            places.append((mark, start, len(ids)))
    rendered = prompts.render(ids, answer_prefix)
    [first, *_] = found(ids, rendered)
    spans: dict[str, list[range]] = {}
    for mark, start, stop in places:
        spans.setdefault(mark, []).append(range(first + start, first + stop))
    return Laid(rendered, spans)


def found(part: Sequence[int], ids: Sequence[int]) -> list[int]:
    """The places at which `part` stands in `ids`."""
    size = len(part)
    starts = range(len(ids) - size + 1) if size else range(0)
    return [start for start in starts if ids[start : start + size] == part]


def filled(source: Iterator[str], tokens: int, prompts: TokenizerPrompts, name: str) -> list[str]:
    """Sentences, each after a space, of up to `tokens` tokens in all.

    Raises:
        UserError: the source ends before.
    """
    chosen: list[str] = []
    used = 0
    for sentence in source:
        used += len(prompts.encode(f" {sentence}"))
        if used > tokens:
            return chosen
        chosen.append(f" {sentence}")
    raise UserError(f"calibration={name}: has {used} tokens left where {tokens} are needed")


def answered(model: Model, ids: list[int], right: str, answers: str, room: int) -> list[int]:
    """An answer to the prompt `ids`: the right one, or what the model says in up to `room` tokens."""
    if answers == "forced":
        return model.prompts.encode(right)
    return decode(model, prefill(model, ids, [Compressor()]), room)[0].ids


def watch(model: Model, ids: list[int], watcher: Compressor) -> None:
    """Show each layer's queries, keys and values of `ids` to `watcher.keep_kv`.

    Raises:
        RuntimeError: what the watcher raised.
    """
    [row] = prefill(model, ids, [watcher])
    if row.error is not None:
        raise RuntimeError(row.error)


def fitting(lengths: Sequence[int], model: Model) -> Sequence[int]:
    """The lengths themselves.

    Raises:
        UserError: one is longer than the model's positions, or there is none.
    """
    most = model.shape.max_positions
    if not lengths or not all(0 < length <= most for length in lengths):
        raise UserError(f"calibration.lengths={list(lengths)}: give lengths from 1 to the model's {most}")
    return lengths


def digest(prompts: list[list[int]]) -> str:
    """Hash of all prompts, in order."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def text_of(source: str) -> str:
    """A user's text file.

    Raises:
        UserError: it can't be read.
    """
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise UserError(f"calibration={source}: neither {OWN} nor a text file ({error})") from error
