"""A prompt that is too long loses its middle: questions and instructions stand at its ends."""

from __future__ import annotations

from structkv_bench.errors import UserError
from structkv_bench.task import PromptFormat

Cut = tuple[str | tuple[int, ...], int]
"""A user turn, and how many of its tokens were cut out."""


def joined_text(prompt: str, limit: int, prompts: PromptFormat) -> Cut:
    """LongBench's pred.py: the first and the last half of `limit` tokens, each decoded, then joined.

    `limit` counts the prompt and its BOS, not the chat template or the answer. The joined text may
    encode to a few tokens more or less than the halves had.
    """
    ids = prompts.render(prompt, "", chat=False)
    if len(ids) <= limit:
        return prompt, 0
    half = limit // 2
    return prompts.decode(ids[:half]) + prompts.decode(ids[-half:]), len(ids) - 2 * half


def joined_ids(prompt: str, limit: int, prompts: PromptFormat) -> Cut:
    """LongBench v2's pred.py: the halves are joined as ids and decoded as one."""
    ids = prompts.render(prompt, "", chat=False)
    if len(ids) <= limit:
        return prompt, 0
    half = limit // 2
    return prompts.decode(ids[:half] + ids[half - limit :]), len(ids) - limit


def exact(prompt: str, length: int, answer_room: int, chat: bool, prompts: PromptFormat) -> Cut:
    """Ids of both ends, so many that the rendered prompt and the answer fill `length` exactly.

    The ids never go through text again.

    Raises:
        UserError: nothing of the prompt would be left.
    """
    room = length - answer_room
    ids = prompts.encode(prompt)
    if len(ids) <= room and len(prompts.render(prompt, "", chat)) <= room:
        return prompt, 0
    kept = room - len(prompts.render((), "", chat))
    if kept < 2:
        raise UserError(f"task.lengths must be {length - kept + 2} or more with this model and task")
    cut = max(len(ids) - kept, 0)
    half = (len(ids) - cut) // 2
    return (*ids[:half], *ids[half + cut :]), cut
