"""``RotaryEmbedding``: the rotation as a module with tables of its own."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.rotation.api import apply_rope, apply_rope_qk
from fused_rope_attn.rotation.tables import check_frequencies, check_sizes, rope_tables
from fused_rope_attn.rotation.validation import LAYOUTS
from fused_rope_attn.runtime.axes import RotationLayout


class RotaryEmbedding(torch.nn.Module):
    """``apply_rope`` with tables of its own, which grow for longer sequences.

    Args:
        dim: R, the rotary dim; the columns of wider heads from R on pass through.
        max_seq_len: rows of the tables at first.
        base: of the frequencies.
        interleaved: the layout of the pairs.

    The tables are no parameters and no buffers: they stay float32 in a module that is cast to bfloat16, are in no
    state_dict, and are made anew, exactly equal, wherever the module is moved, copied or unpickled.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 10000.0, interleaved: bool = False):
        check_frequencies(dim, 2, base)
        check_sizes(max_seq_len=max_seq_len)
        if not isinstance(interleaved, bool):
            raise TypeError(f"interleaved must be a bool, but is {type(interleaved).__name__}")
        super().__init__()
        self.dim, self.max_seq_len, self.base, self.interleaved = int(dim), int(max_seq_len), base, interleaved
        self._cos: torch.Tensor | None = None
        self._sin: torch.Tensor | None = None

    def forward(
        self,
        x: torch.Tensor,
        k: torch.Tensor | None = None,
        *,
        layout: RotationLayout = "bhsd",
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        inverse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x rotated, or (x, k) with k, in one launch. Arguments as in ``apply_rope``.

        seq_len: positions that the tables must have; default the tokens of x. Say it where ``position_ids`` reach
        further: they are not looked at (on a GPU that would stop the host), and one beyond the tables gives NaN.
        """
        rows = seq_len
        if rows is None:
            known = isinstance(x, torch.Tensor) and layout in LAYOUTS and x.ndim > LAYOUTS[layout][2]
            rows = x.shape[LAYOUTS[layout][2]] if known else 0  # what is wrong here, apply_rope refuses
        cos, sin = self.tables(rows, x.device if isinstance(x, torch.Tensor) else None)
        options: dict[str, Any] = {"rotary_dim": self.dim, "interleaved": self.interleaved, "inverse": inverse}
        options |= {"layout": layout, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
        if k is None:
            return apply_rope(x, cos, sin, **options)
        q_rot, k_rot = apply_rope_qk(x, k, cos, sin, **options)
        return q_rot, k_rot

    def tables(self, seq_len: int, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's cos and sin ``(S, R/2)`` float32 on ``device``, grown to ``seq_len`` rows if need be."""
        check_sizes(seq_len=seq_len)
        cos, sin = self._cos, self._sin
        if cos is None or sin is None or not _on(cos.device, device):
            cos, sin = self._grow(max(seq_len, self.max_seq_len), device)
        elif cos.shape[0] < seq_len:
            cos, sin = self._grow(max(seq_len, 2 * cos.shape[0]), cos.device)  # twice: a loop of decoding grows rarely
        return cos, sin

    def _grow(self, rows: int, device: torch.device | str | None) -> tuple[torch.Tensor, torch.Tensor]:
        # Tables made in inference mode could never be saved for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            self._cos, self._sin = rope_tables(rows, self.dim, base=self.base, device=device)
        return self._cos, self._sin

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cos": None, "_sin": None}

    def extra_repr(self) -> str:
        return f"{self.dim}, max_seq_len={self.max_seq_len}, base={self.base}, interleaved={self.interleaved}"


def _on(device: torch.device, wanted: torch.device | str | None) -> bool:
    """True where ``device`` is the wanted one; "cuda" is any GPU."""
    if wanted is None:
        return True
    wanted = torch.device(wanted)
    return device.type == wanted.type and wanted.index in (None, device.index)
