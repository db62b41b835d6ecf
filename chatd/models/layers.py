"""The parts of a decoder layer beside attention: rotary tables, the gated MLP, and what all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from chatd_kernels.silu_mul import silu_mul

if TYPE_CHECKING:
    from chatd.models.model_config import DecoderConfig
    from chatd.models.quantization import PackedLinear


def rotary_tables(config: DecoderConfig, num_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each `[num_positions, head_dim / 2]` float32, in the arithmetic of transformers.

    Frequencies of scaled rotary embeddings come from transformers' own functions, which are imported only then.
    """
    frequencies, scaling = _inverse_frequencies(config)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies.float()
    return (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)


def _inverse_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    # Takes a second to import, so only where it is needed.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](_RopeConfig(config), device=torch.device("cpu"))
    return frequencies, float(scaling)


class _RopeConfig:
    """What transformers' rotary functions read of a configuration."""

    def __init__(self, config: DecoderConfig) -> None:
        self.rope_parameters: dict[str, Any] = dict(config.rope_parameters)
        self.head_dim = config.head_dim
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_heads
        self.max_position_embeddings = config.max_position_embeddings

    def standardize_rope_params(self) -> None:
        """Do nothing: the parameters were brought into the present spelling when they were read."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up as one product.

    Attributes:
        gate_up: `[2 * intermediate_size, hidden_size]`, the gate's rows first.
        down: `[hidden_size, intermediate_size]`.
    """

    gate_up: PackedLinear
    down: PackedLinear

    def forward(
        self, x: torch.Tensor, gate_up: torch.Tensor, activation: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Write `[num_rows, hidden_size]` to `out` and return it.

        Args:
            x: `[num_rows, hidden_size]` of the model's dtype.
            gate_up: Scratch, `[num_rows, 2 * intermediate_size]` likewise.
            activation: Scratch, `[num_rows, intermediate_size]` likewise.
            out: `[num_rows, hidden_size]` likewise; not `x`.
        """
        return self.down(silu_mul(self.gate_up(x, gate_up), activation), out)
