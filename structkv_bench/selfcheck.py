"""A model is used only if our layer loop gives the stock model's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structkv_bench.engine.batch import Batch
from structkv_bench.engine.method import Compressor
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.shape import ModelShape

PROMPT_TOKENS = 24
CONTINUED_TOKENS = 2  # the second one meets what the first has stored
TOLERANCE = {torch.float32: 1e-3}
"""Of the largest logit; half precision rounds in another order."""


def checked(module: Any, prompts: TokenizerPrompts, shape: ModelShape) -> Model:
    """The model in our hands, after a short prompt and some decoded tokens went through both loops.

    Raises:
        UserError: the family is built in another way, or its forward does more than our loop knows of.
    """
    family = module.config.model_type
    try:
        expected = _stock_logits(module)
        model = Model(module, prompts, shape)
        got = _own_logits(model)
    except AttributeError as error:
        raise UserError(f"{family}: not a model of the Llama family ({error})") from error
    except Exception as error:  # a layer that needs more than we hand it, whatever it then raises
        raise UserError(f"{family}: not supported ({kind_and_line(error)})") from error
    tolerance = TOLERANCE.get(model.dtype, 0.05)
    off = (got - expected.to(got.device)).abs().max() / expected.abs().max()
    if not off <= tolerance:
        raise UserError(
            f"{family}: our layer loop gives other logits than the stock model "
            f"(off by {off:.2g} of the largest, at most {tolerance} is allowed); this family is not supported"
        )
    return model


def _ids(vocabulary: int) -> list[int]:
    return [(7 * i + 3) % vocabulary for i in range(PROMPT_TOKENS + CONTINUED_TOKENS)]


def _stock_logits(module: Any) -> Tensor:
    """fp32 logits of the stock forward after the prompt and after each token that follows it."""
    with torch.inference_mode():
        device = module.get_input_embeddings().weight.device
        ids = torch.tensor([_ids(module.config.vocab_size)], device=device)
        return module(ids).logits[0, PROMPT_TOKENS - 1 :].float()  # type: ignore[no-any-return]


def _own_logits(model: Model) -> Tensor:
    """The same logits through our loop: a prefill, then tokens one by one."""
    ids = _ids(model.shape.vocabulary)
    with torch.inference_mode():
        [row] = prefill(model, ids[:PROMPT_TOKENS], [Compressor()])
        if row.error is not None or row.logits is None:
            raise RuntimeError(row.error)
        got = [row.logits]
        batch = Batch(model, [row], room=CONTINUED_TOKENS)
        for token in ids[PROMPT_TOKENS:]:
            got.append(batch.forward(torch.tensor([[token]], device=model.device))[0])
    return torch.stack(got)
