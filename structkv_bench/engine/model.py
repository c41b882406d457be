"""A causal model of the Llama family, driven layer by layer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from structkv_bench.engine.attention import IMPLEMENTATION, Step
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.shape import ModelShape


class Model:
    """A causal model of the Llama family: transformers' own layers, our loop over them.

    What varies between families (norms, biases, QK norm, windows) stays in transformers' modules.
    """

    def __init__(self, module: Any, prompts: TokenizerPrompts, shape: ModelShape) -> None:
        """Take over a loaded model; its own forward can't be called afterwards (see selfcheck.py).

        Raises:
            AttributeError: the module is not built like a Llama.
        """
        self._module = module.eval()
        self.prompts = prompts
        self.shape = shape
        self.stop_ids = prompts.stop_ids(module.config.eos_token_id, module.generation_config.eos_token_id)
        self.layers: list[nn.Module] = list(module.model.layers)
        self._rotary, self._norm = module.model.rotary_emb, module.model.norm
        self._embed, self._head = module.get_input_embeddings(), module.lm_head
        module.set_attn_implementation(IMPLEMENTATION)

    @property
    def family(self) -> str:
        """As transformers calls it."""
        return str(self._module.config.model_type)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and cache."""
        return self._embed.weight.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return torch.device(self._embed.weight.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, tied ones once."""
        return sum(weight.nbytes for weight in self._module.parameters())

    @property
    def fingerprint(self) -> str:
        """Hash of the architecture and of a sample of every weight; the version of transformers left out."""
        config = self._module.config.to_diff_dict()
        config.pop("transformers_version", None)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
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
