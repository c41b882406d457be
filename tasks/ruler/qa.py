"""RULER's question answering: a question whose documents lie among others of the same data set."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from heapq import nlargest

from structkv_bench.errors import UserError

from .data import TASKS
from .fit import Draft, Room, draw_fitting, largest_size
from .questions import Question, Questions

_TASK = TASKS["qa"]
_STEP = 10
_SKIPPED = 100
"""Documents in a row that don't fit any more, after which a tight fit looks for no smaller one."""
_TOKENS = 150
"""Of a document, roughly."""
_LONGEST = 8
"""Prompts, the longest by characters, of which the one with most tokens is looked for."""


def drafts(room: Room, corpus: Questions, seed: int) -> Iterator[Draft]:
    """One sample per question, in the order of the file.

    Raises:
        UserError: there are fewer questions than samples, or a question's own documents don't fit.
    """
    questions = corpus.questions
    if room.samples > len(questions):
        raise UserError(
            f"RULER's {room.subtask} has one sample per question: task.samples must be at most "
            f"{len(questions)}, not {room.samples}"
        )
    return _tight(room, corpus, seed) if room.tight else _upstream(room, corpus, seed)


def _upstream(room: Room, corpus: Questions, seed: int) -> Iterator[Draft]:
    """Upstream finds the number of documents on the first question, and keeps it for all."""
    rng = random.Random(seed)

    def draw(question: Question, size: int) -> Draft:
        documents = _drawn(size, question, corpus, rng)
        random.Random(seed).shuffle(documents)
        return _draft(question, documents)

    first = corpus.questions[0]
    tokens_per_document = room.used(draw(first, _STEP)) / _STEP
    upper = max(int(room.length / tokens_per_document * 3), 2 * _STEP)
    size = largest_size(lambda count: room.fits(draw(first, count)), _STEP, upper)
    for question in corpus.questions:
        try:
            yield draw_fitting(partial(draw, question), room, size, _STEP, least=len(question.documents))
        except UserError:
            asked = corpus.questions[: room.samples]
            raise _too_short(room, (draw(question, _STEP) for question in asked)) from None


def _drawn(size: int, question: Question, corpus: Questions, rng: random.Random) -> list[str]:
    """`size` documents: the question's own, then those of its article, then any others."""
    own, related, documents = question.documents, question.related, corpus.documents
    further = size - len(own)
    if size >= len(documents):
        return (documents * (size // len(documents) + 1))[:size]
    if further <= len(related):
        chosen = own + rng.sample(related, max(further, 0))
    else:
        mine = {*own, *related}
        others = [place for place in range(len(documents)) if place not in mine]
        chosen = own + related + rng.sample(others, max(further - len(related), 0))
    return [documents[place] for place in chosen]


def _tight(room: Room, corpus: Questions, seed: int) -> Iterator[Draft]:
    """Each question gets documents until none fits any more."""
    seeds = random.Random(seed)
    # The last number has most digits, and what follows a document decides on the tokens at its end.
    head = f"Document {room.length // _TOKENS}:\n"
    heading = len(room.prompts.encode(head))

    @cache
    def cost(place: int) -> int:
        return len(room.prompts.encode(f"{head}{corpus.documents[place]}\n\n{head}")) - heading

    def own(question: Question) -> Draft:
        return _draft(question, [corpus.documents[place] for place in question.documents])

    for question in corpus.questions:
        draft = _filled(room, corpus, question, random.Random(seeds.getrandbits(32)), cost)
        if draft is None:
            asked = corpus.questions[: room.samples]
            raise _too_short(room, (own(question) for question in asked))
        yield draft


def _filled(
    room: Room, corpus: Questions, question: Question, rng: random.Random, cost: Callable[[int], int]
) -> Draft | None:
    """A question's own documents and as many further ones as fit; None where its own don't.

    The tokens of documents are added up; one count of the whole text tells what really is free, and
    the search goes on from there.
    """

    def draft(places: list[int]) -> Draft:
        shuffled = rng.sample(places, len(places))
        return _draft(question, [corpus.documents[place] for place in shuffled])

    chosen = question.documents.copy()
    candidates = _candidates(question, len(corpus.documents), room.length // 8 + _SKIPPED, rng)
    spare = room.spare(_draft(question, [])) - sum(map(cost, chosen))
    chosen += _fitting(candidates, spare, 2 * room.margin, cost)
    removed = False
    while True:
        whole = draft(chosen)
        spare = room.spare(whole)
        if spare < 0 and len(chosen) == len(question.documents):
            return None
        if spare < 0:
            chosen.pop()
            removed = True  # by now the sum was too low, and would be again
            continue
        added = [] if removed else _fitting(candidates, spare, 2 * room.margin, cost)
        if not added:
            return whole
        chosen += added


def _candidates(question: Question, count: int, most: int, rng: random.Random) -> Iterator[int]:
    """Further documents: those of the article, then `most` others, then all of the data set again."""
    yield from rng.sample(question.related, len(question.related))
    mine = {*question.documents, *question.related}
    yield from (place for place in rng.sample(range(count), min(count, most)) if place not in mine)
    while True:
        yield from range(count)


def _fitting(candidates: Iterator[int], spare: int, margin: int, cost: Callable[[int], int]) -> list[int]:
    """Those of the next candidates that fit `spare` tokens together, until no more than `margin` are left."""
    chosen: list[int] = []
    skipped = 0
    while spare > margin and skipped < _SKIPPED:
        place = next(candidates)
        if cost(place) <= spare:
            chosen.append(place)
            spare -= cost(place)
            skipped = 0
        else:
            skipped += 1
    return chosen


def _draft(question: Question, documents: Iterable[str]) -> Draft:
    context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1))
    return Draft(
        prompt=_TASK["template"].format(context=context, query=question.text),
        answer_prefix=_TASK["answer_prefix"],
        references=question.answers,
    )


def _too_short(room: Room, smallest: Iterable[Draft]) -> UserError:
    """The error that names a length for all samples, of which `smallest` are the smallest forms."""
    longest = nlargest(_LONGEST, smallest, key=lambda draft: len(draft.prompt))
    return room.too_short(max(map(room.used, longest)) + room.max_new_tokens)
