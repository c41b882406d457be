"""A language model and its tokenizer: loaded, checked, and driven layer by layer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from structkv_bench import gguf
from structkv_bench.engine.attention import IMPLEMENTATION, Step
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.model_spec import ModelSpec
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.shape import ModelShape

NOT_NEEDED = ["original/*", "consolidated*", "*.pth", "*.bin", "*.gguf"]
"""Copies of the weights in other formats that some hub repositories carry beside the safetensors."""


class Model:
    """A causal model of the Llama family: transformers' own layers, our loop over them.

    What varies between families (norms, biases, QK norm, windows) stays in transformers' modules.
    """

    def __init__(self, module: Any, prompts: TokenizerPrompts, shape: ModelShape) -> None:
        """Take over a loaded model; its own forward can't be called afterwards.

        Raises:
            UserError: the model is not of a family that this loop drives, or gives other logits.
        """
        self._module: Any = module.eval()
        self.prompts = prompts
        self.shape = shape
        config = self._module.config
        self.stop_ids = prompts.stop_ids(config.eos_token_id, self._module.generation_config.eos_token_id)
        try:
            self.layers: list[nn.Module] = list(self._module.model.layers)
            self._rotary, self._norm = self._module.model.rotary_emb, self._module.model.norm
            self._embed, self._head = self._module.get_input_embeddings(), self._module.lm_head
        except AttributeError as error:
            raise UserError(f"{config.model_type}: not a model of the Llama family ({error})") from error
        expected = _stock_logits(self._module)
        self._module.set_attn_implementation(IMPLEMENTATION)
        _check_logits(self, expected)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return torch.device(self._embed.weight.device)

    @property
    def fingerprint(self) -> str:
        """Hash of the architecture and of a sample of every weight."""
        digest = hashlib.sha256(self._module.config.to_json_string().encode())
        for name, weight in self._module.named_parameters():
            digest.update(name.encode())
            digest.update(weight.detach().flatten()[:64].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def embed(self, ids: Tensor) -> Tensor:
        """[rows, n] -> [rows, n, hidden_size]."""
        return self._embed(ids)  # type: ignore[no-any-return]

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, n, head_dim] of positions [rows, n]."""
        return self._rotary(hidden, positions)  # type: ignore[no-any-return]

    def run_layer(
        self, layer: nn.Module, hidden: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], step: Step
    ) -> Tensor:
        """One decoder layer; its attention meets the keys that `step` holds.

        No cache is handed to the layer: its argument was renamed twice in transformers 5.x, and what
        is kept is this engine's affair.
        """
        return layer(  # type: ignore[no-any-return]
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rotary,
            use_cache=False,
            kv_step=step,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocabulary] of last-layer states [rows, hidden_size]."""
        return self._head(self._norm(hidden)).float()  # type: ignore[no-any-return]

    def rotate(self, vectors: Tensor, shift: Tensor) -> Tensor:
        """Rotary vectors [heads, n, head_dim] as they would be `shift` [n] positions further on."""
        cos, sin = self.rotary(vectors, shift[None])
        half = vectors.shape[-1] // 2
        turned = torch.cat((-vectors[..., half:], vectors[..., :half]), dim=-1)
        return (vectors * cos + turned * sin) / getattr(self._rotary, "attention_scaling", 1.0)


def fetch(spec: ModelSpec) -> Path:
    """Put a model into the local caches, so that later runs need no network; where it lies.

    Raises:
        UserError: it is not to be had.
    """
    local = _local(spec)
    if local is not None:
        return local
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec.path, revision=spec.revision, ignore_patterns=NOT_NEEDED))
    except Exception as error:  # the hub's client raises many kinds, some of them its transport's
        raise _not_to_be_had(spec, error) from error


def inspect(spec: ModelSpec) -> tuple[TokenizerPrompts, ModelShape]:
    """A model's tokenizer and sizes, without its weights.

    Raises:
        UserError: as for `load`.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = _from_pretrained(AutoTokenizer, spec)
    shape = ModelShape.of(_from_pretrained(AutoConfig, spec), spec.dtype, spec.max_positions)
    return TokenizerPrompts(tokenizer, spec.chat_template), shape


def load(spec: ModelSpec) -> Model:
    """Load a model and check it; about a second for the embedded one.

    Raises:
        UserError: the model is missing, damaged, or not one that the engine drives exactly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    prompts, shape = inspect(spec)
    device_map = spec.device_map or ("cuda" if torch.cuda.is_available() else None)
    module = _from_pretrained(
        AutoModelForCausalLM,
        spec,
        dtype=getattr(torch, spec.dtype),
        device_map=device_map,
        attn_implementation="sdpa",
    )
    return Model(module, prompts, shape)


def _local(spec: ModelSpec) -> Path | None:
    """The folder of a model that is no hub id."""
    file = gguf.locate(spec.path)
    if file is not None:
        return gguf.converted(file, spec.dtype, spec.sha256)
    folder = Path(spec.path).expanduser()
    return folder if folder.is_dir() else None


def _from_pretrained(kind: Any, spec: ModelSpec, **settings: Any) -> Any:
    """One of transformers' Auto classes, loaded from where the model lies.

    Raises:
        UserError: it can't be found, or not be read.
    """
    local = _local(spec)
    try:
        if local is not None:
            return kind.from_pretrained(local, **settings)
        return kind.from_pretrained(spec.path, revision=spec.revision, **settings)
    except Exception as error:  # a damaged file surfaces as whatever its parser raises
        if local is None:
            raise _not_to_be_had(spec, error) from error
        raise UserError(f"model {spec.name}: {local} can't be loaded: {kind_and_line(error)}") from error


def _not_to_be_had(spec: ModelSpec, error: Exception) -> UserError:
    return UserError(
        f"model {spec.name}: {spec.path} is no local folder, and not in the cache or not readable "
        f"({kind_and_line(error)}); where there is network, run: structkv-bench fetch model={spec.name}"
    )


def too_long(spec: ModelSpec, shape: ModelShape, length: int) -> str:
    """What to say of a length above the model's positions."""
    return f"task.lengths={length}: model {spec.name} has {shape.max_positions} positions, so at most that"


CHECKED_TOKENS = 24
CONTINUED_TOKENS = 3


def _check_ids(module: Any) -> list[int]:
    return [(7 * i + 3) % module.config.vocab_size for i in range(CHECKED_TOKENS + CONTINUED_TOKENS)]


def _stock_logits(module: Any) -> Tensor:
    """fp32 logits of the stock forward after the prompt and after each token that follows it."""
    with torch.inference_mode():
        ids = torch.tensor([_check_ids(module)], device=module.get_input_embeddings().weight.device)
        return module(ids).logits[0, CHECKED_TOKENS - 1 :].float()  # type: ignore[no-any-return]


def _check_logits(model: Model, expected: Tensor) -> None:
    """Refuse a model whose layers do more than the engine's loop knows of.

    Raises:
        UserError: prefill or decode gives other logits than the stock forward.
    """
    from structkv_bench.engine.decode import Batch
    from structkv_bench.engine.method import Compressor
    from structkv_bench.engine.prefill import prefill

    ids = _check_ids(model._module)
    with torch.inference_mode():
        [row] = prefill(model, ids[:CHECKED_TOKENS], [Compressor()])
        if row.error is not None or row.logits is None:
            raise UserError(f"{model._module.config.model_type}: the engine can't drive this model")
        got = [row.logits]
        batch = Batch(model, [row], room=CONTINUED_TOKENS)
        for token in ids[CHECKED_TOKENS:]:
            got.append(batch.forward(torch.tensor([[token]], device=model.device))[0])
    tolerance = 1e-3 if model._embed.weight.dtype == torch.float32 else 0.05
    off = (torch.stack(got) - expected.to(got[0].device)).abs().max() / expected.abs().max()
    if not off <= tolerance:
        raise UserError(
            f"{model._module.config.model_type}: our layer loop gives other logits than the stock model "
            f"(off by {off:.2g} of the largest, at most {tolerance} is allowed); this family is not supported"
        )
