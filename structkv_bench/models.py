"""A language model and its tokenizer: loaded, checked, and driven layer by layer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from structkv_bench import gguf
from structkv_bench.catalog import choices
from structkv_bench.engine.attention import IMPLEMENTATION, Step
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.model_spec import ModelSpec
from structkv_bench.paths import expanded
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.shape import ModelShape

SAMPLED_PLACES, SAMPLED_BYTES = 256, 4096
"""Of each weight file, for its hash."""
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
        try:
            expected = _stock_logits(self._module)
            self._module.set_attn_implementation(IMPLEMENTATION)
            got = _own_logits(self)
        except Exception as error:  # a layer that needs more than we hand it, whatever it then raises
            raise UserError(f"{config.model_type}: not supported ({kind_and_line(error)})") from error
        _compare(self, got, expected)

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


@dataclass(frozen=True)
class Inspected:
    """What is known of a model without its weights in memory."""

    prompts: TokenizerPrompts
    shape: ModelShape
    identity: dict[str, str]
    """Hashes that change when weights, config or tokenizer do."""


def inspect(spec: ModelSpec) -> Inspected:
    """A model's tokenizer, sizes and identity.

    Raises:
        UserError: as for `load`.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, config = _from_pretrained(AutoTokenizer, spec), _from_pretrained(AutoConfig, spec)
    try:
        shape = ModelShape.of(config, spec.dtype, spec.max_positions)
    except AttributeError as error:
        raise UserError(f"model {spec.name}: {config.model_type} is not of the Llama family") from error
    prompts = TokenizerPrompts(tokenizer, spec.chat_template)
    local = _local(spec)
    weights = file_hash(local) if local is not None else str(config._commit_hash)
    return Inspected(prompts, shape, {"weights": weights, "tokenizer": prompts.fingerprint})


def file_hash(folder: Path) -> str:
    """Hash of a model folder's config and of samples of its weight files: a moment at any size."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in range(0, size, max(size // SAMPLED_PLACES, SAMPLED_BYTES)):
                opened.seek(place)
                digest.update(opened.read(SAMPLED_BYTES))
    return digest.hexdigest()[:16]


def load(spec: ModelSpec) -> Model:
    """Load a model and check it; about a second for the embedded one.

    Raises:
        UserError: the model is missing, damaged, or not one that the engine drives exactly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    inspected = inspect(spec)
    device_map = spec.device_map or ("cuda" if torch.cuda.is_available() else None)
    module = _from_pretrained(
        AutoModelForCausalLM,
        spec,
        dtype=getattr(torch, spec.dtype),
        device_map=device_map,
        attn_implementation="sdpa",
    )
    return Model(module, inspected.prompts, inspected.shape)


def _local(spec: ModelSpec) -> Path | None:
    """The folder of a model that is no hub id."""
    file = gguf.locate(spec.path)
    if file is not None:
        return gguf.converted(file, spec.dtype, spec.sha256)
    folder = expanded(spec.path)
    if folder.is_dir() and spec.sha256 is not None:
        raise UserError(f"model {spec.name}: sha256 is that of a single file, and {spec.path} is a folder")
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
    how = f"model={spec.name}" if spec.name in choices("model") else f"model=custom model.path={spec.path}"
    return UserError(
        f"model {spec.name}: {spec.path} is no local folder, and not in the cache or not readable "
        f"({kind_and_line(error)}); where there is network, run: structkv-bench fetch {how}"
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


def _own_logits(model: Model) -> Tensor:
    """The same logits through our loop: a prefill, then tokens one by one."""
    from structkv_bench.engine.decode import Batch
    from structkv_bench.engine.method import Compressor
    from structkv_bench.engine.prefill import prefill

    ids = _check_ids(model._module)
    with torch.inference_mode():
        [row] = prefill(model, ids[:CHECKED_TOKENS], [Compressor()])
        if row.error is not None or row.logits is None:
            raise RuntimeError(row.error)
        got = [row.logits]
        batch = Batch(model, [row], room=CONTINUED_TOKENS)
        for token in ids[CHECKED_TOKENS:]:
            got.append(batch.forward(torch.tensor([[token]], device=model.device))[0])
    return torch.stack(got)


def _compare(model: Model, got: Tensor, expected: Tensor) -> None:
    """Refuse a model whose forward does more than the engine's loop knows of.

    Raises:
        UserError: prefill or decode gives other logits than the stock forward.
    """
    tolerance = 1e-3 if model._embed.weight.dtype == torch.float32 else 0.05
    off = (got - expected.to(got.device)).abs().max() / expected.abs().max()
    if not off <= tolerance:
        raise UserError(
            f"{model._module.config.model_type}: our layer loop gives other logits than the stock model "
            f"(off by {off:.2g} of the largest, at most {tolerance} is allowed); this family is not supported"
        )
