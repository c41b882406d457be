"""From a sample's text to token ids: the chat template, the prefix, and exactly one BOS."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from structkv_bench.task import Sample

PLACE = "(the prompt stands here)"
"""Stands in for a prompt of ids while a template is filled."""
END_OF_TURN = ("<|eot_id|>", "<|im_end|>")
"""Tokens that end a chat turn but that some models' files don't list among their stop ids."""


@dataclass(frozen=True)
class TokenizerPrompts:
    """task.PromptFormat for a transformers tokenizer."""

    tokenizer: Any
    chat_template: bool = True
    """Wrap prompts in the tokenizer's chat template, if it has one."""

    @cached_property  # it writes out the whole vocabulary
    def fingerprint(self) -> str:
        """Hash of all that makes ids out of a prompt: vocabulary, rules and chat template."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items())
        template = self.tokenizer.chat_template if self.chat_template else None
        return hashlib.sha256(repr((rules, template)).encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens, spaces as the model made them."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def render(self, prompt: str | Sequence[int], answer_prefix: str, chat: bool = True) -> list[int]:
        """The whole prompt: one user turn, the assistant's header, then the prefix.

        Text is tokenised once and without the tokenizer's own special tokens, since a template brings
        its BOS; where neither did and the tokenizer would have added one, it is put in front. A prompt
        given as ids stays as it is, between the ids of what the template puts around it.
        """
        if isinstance(prompt, str):
            return self._with_one_bos(self.encode(self._turn(prompt, chat) + answer_prefix))
        before, _, after = self._turn(PLACE, chat).partition(PLACE)
        return self._with_one_bos(self.encode(before) + list(prompt) + self.encode(after + answer_prefix))

    def parts(self, sample: Sample) -> tuple[list[int], list[int]]:
        """A sample's prompt: what is prefilled, and what is fed afterwards over the compressed cache.

        The second part is empty unless the sample has a `question_at`. Then each is tokenised by
        itself, as two calls would be: a token across the border does not exist.
        """
        at, prompt = sample.question_at, sample.prompt
        if at is None:
            return self.render(prompt, sample.answer_prefix, sample.chat), []
        before, _, after = self._turn(PLACE, sample.chat).partition(PLACE)
        context = self._with_one_bos([*self.encode(before), *self._ids(prompt[:at])])
        return context, [*self._ids(prompt[at:]), *self.encode(after + sample.answer_prefix)]

    def _ids(self, text: str | Sequence[int]) -> list[int]:
        return self.encode(text) if isinstance(text, str) else list(text)

    def _turn(self, prompt: str, chat: bool) -> str:
        """The prompt in the chat template, if there is one and it is wanted."""
        if not (chat and self.chat_template and self.tokenizer.chat_template):
            return prompt
        turn = [{"role": "user", "content": prompt}]
        return str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return ids
        if self.tokenizer.encode("a")[0] == bos and ids[:1] != [bos]:
            return [bos, *ids]
        while ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def newline_ids(self) -> frozenset[int]:
        """The token that LongBench's samsum stops at: the last one of an encoded newline."""
        return frozenset(self.encode("\n")[-1:])

    def stop_ids(self, *configured: int | list[int] | None) -> frozenset[int]:
        """Every id that ends an answer: those configured, the tokenizer's, and ends of turn it knows."""
        ids: set[int] = set()
        for some in (*configured, self.tokenizer.eos_token_id):
            ids.update([some] if isinstance(some, int) else some or [])
        for token in END_OF_TURN:  # one by one: the whole vocabulary takes a while to write out
            id = self.tokenizer.convert_tokens_to_ids(token)
            if id is not None and self.tokenizer.convert_ids_to_tokens(id) == token:
                ids.add(id)
        return frozenset(ids)
