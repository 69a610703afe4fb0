"""Random intervals of query rows with the other masks, and which pairs they show."""

import random
from typing import NamedTuple

import torch

from fused_rope_attn.attention import reference


class Drawn(NamedTuple):
    """Two batch entries: bounds of keys (2,) or None, from where FROM_START counts keys, and the interval of each key.
    window: keys before and after a query's own position, None for no such bound."""

    num_rows: int
    num_keys: int
    window: tuple[int | None, int | None]
    kv_starts: torch.Tensor | None
    kv_lens: torch.Tensor | None
    from_start: bool
    starts: torch.Tensor
    ends: torch.Tensor

    def visible(self):
        """Return which pairs see each other, (2, NQ, NK), and each entry's first key as the kernels count."""
        positions, keys = reference.positions(self.num_rows, self.num_keys, self.kv_lens, torch.device("cpu"))
        sides = tuple(-1 if side is None else side for side in self.window)
        masks = {"kv_starts": self.kv_starts, "kv_lens": self.kv_lens}
        masks |= {"query_starts": self.starts, "query_ends": self.ends}
        visible = reference.visible_pairs(positions, keys, False, window=sides, **masks)
        if not self.from_start:
            return visible.expand(2, -1, -1), [0, 0]
        # Positions count from the first key, and queries at negative ones see no key.
        lens = torch.tensor(self.num_keys) if self.kv_lens is None else self.kv_lens.clamp(0, self.num_keys)
        first = self.kv_starts.clamp(min=0).minimum(lens)
        return visible & (positions >= first[:, None])[..., None], first.tolist()


def drawn(seed, most, reads_lengths=True):
    """Return a case of up to ``most`` rows and keys; reads_lengths: also of ``kv_lens`` and of FROM_START."""
    draw = random.Random(seed)
    num_rows, num_keys = draw.randint(1, most), draw.randint(1, most)
    window = draw.choice([None, None, 0, most // 4]), draw.choice([None, 0, 0, most // 6])
    kv_starts, kv_lens = (
        torch.tensor([draw.randint(-3, num_keys + 3) for _ in range(2)], dtype=torch.int32) if given else None
        for given in (draw.random() < 0.4, draw.random() < 0.4 and reads_lengths)
    )
    starts, ends = torch.empty((2, 2, num_keys), dtype=torch.int32)
    for b in range(2):
        j = 0
        while j < num_keys:  # runs of equal intervals, and single ones of any kind
            low, high = draw.randint(-3, num_rows + 2), draw.randint(-3, num_rows + 9)
            end = j + draw.choice([1, 2, most // 4, most // 2])
            starts[b, j:end], ends[b, j:end] = (0, num_rows) if draw.random() < 0.6 else (low, high)
            j = end
    from_start = kv_starts is not None and reads_lengths and draw.random() < 0.5
    return Drawn(num_rows, num_keys, window, kv_starts, kv_lens, from_start, starts, ends)
