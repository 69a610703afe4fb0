"""Draws the design pages' pictures as SVG, for light and for dark pages: ``python docs/design/pictures/draw.py``.

The files are committed, so that building the site draws nothing. Coordinates are pixels of a canvas that is 1000 wide.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# Of each role: (fill, stroke). "band" is the ground behind a group of boxes.
THEMES = {
    "light": {
        "text": "#1d2733", "muted": "#5a6675", "line": "#66727f", "band": ("#f5f7f9", "#d9dfe5"),
        "host": ("#e5effc", "#2f66b5"), "record": ("#fff3d6", "#b9800f"), "gpu": ("#e2f3e8", "#2c7f50"),
        "warps": ("#efe8fb", "#7249b8"), "memory": ("#fff3d6", "#b9800f"), "plain": ("#ffffff", "#8793a0"),
        "soft": ("#fbe6e9", "#bb4a5b"),
    },
    "dark": {
        "text": "#e6ebf0", "muted": "#a3afbb", "line": "#97a3b0", "band": ("#1a2027", "#333d48"),
        "host": ("#1b2f4a", "#7aaef2"), "record": ("#40330f", "#e2b04a"), "gpu": ("#173a28", "#67c890"),
        "warps": ("#31254a", "#b493f0"), "memory": ("#40330f", "#e2b04a"), "plain": ("#242c35", "#8793a0"),
        "soft": ("#46222a", "#ee8b9b"),
    },
}  # fmt: skip


class Canvas:
    """Collects SVG elements in the colours of one theme."""

    def __init__(self, height: int, theme: str, title: str):
        self.height, self.colours, self.title = height, THEMES[theme], title
        self.parts: list[str] = []

    def box(self, x, y, w, h, lines, role="plain", mono=False, size=14, radius=8):
        """A rounded box. ``lines``: the first is the title, in bold; the others are explanations below it."""
        fill, stroke = self.colours[role]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}" fill="{fill}" stroke="{stroke}" '
            'stroke-width="1.5"/>'
        )
        pitch = 17
        top = y + h / 2 - (len(lines) - 1) * pitch / 2 + 5
        for i, line in enumerate(lines):
            self.text(
                x + w / 2, top + i * pitch, line, size if i == 0 else 12, bold=i == 0, muted=i > 0, mono=mono and i == 0
            )

    def band(self, y, h, label, x=10, w=980):
        """A group's ground with its name in the upper left corner."""
        fill, stroke = self.colours["band"]
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="12" fill="{fill}" stroke="{stroke}"/>')
        self.text(x + 14, y + 21, label, 12, anchor="start", muted=True, bold=True)

    def group(self, x, y, w, h):
        """A dashed frame around boxes that an arrow reaches together."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="12" fill="none" stroke="{self.colours["line"]}" '
            'stroke-dasharray="2 4" stroke-width="1.3"/>'
        )

    def text(self, x, y, words, size=12, anchor="middle", bold=False, muted=False, mono=False, colour=None):
        colour = colour or self.colours["muted" if muted else "text"]
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight} '
            f'font-family="{MONO if mono else SANS}">{escape(words)}</text>'
        )

    def arrow(self, *points, label="", dashed=False, at=None, role=None, anchor="middle"):
        """A line through ``points`` that ends in a head; its label stands at ``at``, or above its middle."""
        colour = self.colours[role][1] if role else self.colours["line"]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        end = (x1 - 7 * ux, y1 - 7 * uy)
        path = " ".join(f"{x:g},{y:g}" for x, y in (*points[:-1], end))
        head = [
            (x1, y1),
            (x1 - 9 * ux + 4.5 * uy, y1 - 9 * uy - 4.5 * ux),
            (x1 - 9 * ux - 4.5 * uy, y1 - 9 * uy + 4.5 * ux),
        ]
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.7" '
            f'stroke-linejoin="round"{dash}/>'
            f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in head)}" fill="{colour}"/>'
        )
        if label:
            (xa, ya), (xb, yb) = points[:2]
            x, y = at or ((xa + xb) / 2, (ya + yb) / 2 - 6)
            self.text(x, y, label, 11, anchor=anchor, muted=True)

    def slots(self, x, y, w, h, names, role="memory"):
        """A row of buffers side by side."""
        fill, stroke = self.colours[role]
        each = w / len(names)
        for i, name in enumerate(names):
            self.parts.append(
                f'<rect x="{x + i * each:g}" y="{y}" width="{each:g}" height="{h}" rx="4" fill="{fill}" '
                f'stroke="{stroke}" stroke-width="1.3"/>'
            )
            self.text(x + (i + 0.5) * each, y + h / 2 + 4, name, 12)

    def svg(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n{body}\n</svg>\n"
        )


def call(theme: str) -> str:
    """A call's way from the public function to the kernels, and the gradient's way back."""
    c = Canvas(742, theme, "A call's way through the house")
    c.band(10, 84, "your code")
    c.band(104, 342, "attention/")
    c.band(456, 108, "attention/portable/  or  attention/hopper/")
    c.band(574, 158, "GPU")

    c.box(60, 40, 500, 42, ["o = rope_attention(q, k, v, cos, sin, causal=True)"], "plain", mono=True, size=13)
    c.box(640, 40, 310, 42, ["o.backward(do)"], "plain", mono=True, size=13)

    c.arrow((130, 82), (130, 138))
    c.box(60, 138, 140, 56, ["api.py", "autocast"], "host")
    c.arrow((200, 166), (240, 166))
    c.box(240, 138, 150, 56, ["validation.py", "every refusal, typed"], "host")
    c.arrow((390, 166), (430, 166))
    c.box(430, 138, 130, 56, ["Problem, Tensors", "two frozen records"], "record")

    c.arrow((495, 194), (495, 212), (250, 212), (250, 230))
    c.box(60, 230, 330, 56, ["planning.py", "reference or kernels? only what a graph knows"], "host")
    c.arrow((390, 258), (430, 258))
    c.box(430, 230, 130, 56, ["reference.py", "eager PyTorch"], "plain")

    c.arrow((225, 286), (225, 310), label="flattened to the operator's schema", at=(236, 302), anchor="start")
    c.box(60, 310, 330, 50, ["ops.py: one operator", "eager calls skip the dispatcher"], "host")
    c.arrow((225, 360), (225, 382), label="rebuilt", at=(236, 375), anchor="start")
    c.box(60, 382, 500, 50, ["planning.py + configs.py", "backend, strategy, tile: the plan, with its reason"], "host")

    c.arrow((310, 432), (310, 486))
    c.box(
        60,
        486,
        500,
        60,
        ["forward.py: the launcher", "prepared once per signature: grid, strides, descriptors, kernel"],
        "host",
    )

    c.arrow((135, 546), (135, 604))
    c.box(60, 604, 150, 56, ["pre-pass", "rotates K once"], "gpu")
    c.arrow((210, 632), (250, 632), label="K_rot", at=(229, 623))
    c.box(250, 604, 200, 56, ["attention kernel", "rotates Q itself"], "gpu")
    c.arrow((450, 632), (490, 632))
    c.box(490, 604, 70, 56, ["o, lse"], "record")
    c.text(60, 688, "The tail of one kernel overlaps with the start of the next", 12, anchor="start", muted=True)
    c.text(60, 705, "(programmatic dependent launch).", 12, anchor="start", muted=True)

    c.arrow((795, 82), (795, 310))
    c.box(
        640, 310, 310, 50, ["ops.py: the operator's gradient", "has no gradient itself: double backward raises"], "host"
    )
    c.arrow((390, 335), (640, 335), dashed=True, label="saved: rotated q, k; v, o, lse, tables", at=(516, 328))
    c.arrow((795, 360), (795, 382))
    c.box(640, 382, 310, 50, ["planning.py + configs.py", "of the backward pass, by itself"], "host")
    c.arrow((795, 432), (795, 486))
    c.box(640, 486, 310, 60, ["backward.py: the launcher", "prepared once per signature"], "host")
    c.arrow((705, 546), (705, 604))
    c.box(640, 604, 130, 56, ["pre-process", "delta; rotates if due"], "gpu")
    c.arrow((770, 632), (800, 632))
    c.box(800, 604, 150, 56, ["dk, dv and dq", "in the rotated frame"], "gpu")
    c.arrow((875, 660), (875, 680))
    c.box(640, 680, 310, 36, ["rotated back: dq, dk, dv"], "record", size=13)
    return c.svg()


def forward(theme: str) -> str:
    """The sm_90 forward: who fills which buffer, who empties it, and what overlaps."""
    c = Canvas(790, theme, "Warps, buffers and barriers of the sm_90 forward")
    c.band(10, 512, "global memory", x=10, w=150)
    c.band(10, 512, "one block on a multiprocessor", x=172, w=818)
    c.text(300, 58, "warps that fill", 12, muted=True, bold=True)
    c.text(560, 58, "shared memory", 12, muted=True, bold=True)
    c.text(865, 58, "warps that multiply", 12, muted=True, bold=True)
    c.group(746, 74, 238, 340)

    c.box(26, 84, 118, 44, ["counter", "next tile"], "plain")
    c.box(26, 166, 118, 44, ["K_rot", "of the pre-pass"], "plain")
    c.box(26, 246, 118, 44, ["V"], "plain")
    c.box(26, 340, 118, 50, ["Q, cos, sin", "any strides"], "plain")
    c.box(26, 440, 118, 44, ["O, lse"], "plain")

    c.box(226, 76, 148, 224, ["load", "1 warp, 24 registers", "announces tiles,", "K and V by the TMA"], "warps")
    c.box(226, 326, 148, 78, ["rotate_queries", "4 warps, 72 registers", "the next tile's rows"], "warps")

    c.slots(470, 84, 180, 44, ["tile 0", "tile 1", "tile 2", "tile 3"])
    c.slots(470, 166, 180, 44, ["K, stage 0", "K, stage 1"])
    c.slots(470, 246, 180, 44, ["V, stage 0", "V, stage 1"])
    c.slots(470, 343, 180, 44, ["Q, this tile", "Q, next tile"])
    c.slots(470, 440, 180, 44, ["O, 64 rows", "O, 64 rows"])

    c.box(760, 84, 210, 140, ["attend 0", "warpgroup, 4 warps", "208 registers", "rows 0 to 63 of the tile"], "warps")
    c.box(
        760, 264, 210, 140, ["attend 1", "warpgroup, 4 warps", "208 registers", "rows 64 to 127 of the tile"], "warps"
    )
    c.arrow((830, 224), (830, 264))
    c.arrow((900, 264), (900, 224))
    c.text(865, 249, "alternate", 11, muted=True)

    c.arrow((144, 106), (226, 106))
    for y, in_name, name in ((188, "TMA", "keys"), (268, "TMA", "values")):
        c.arrow((144, y), (226, y))
        c.arrow((374, y - 9), (470, y - 9), label=in_name, at=(422, y - 15))
        c.arrow((470, y + 10), (374, y + 10), dashed=True, label=f"{name}.empty", at=(422, y + 25))
    c.arrow((144, 365), (226, 365))
    c.arrow((374, 97), (470, 97), label="announce", at=(422, 91))
    c.arrow((470, 116), (374, 116), dashed=True, label="tiles.empty", at=(422, 131))
    c.arrow((374, 356), (470, 356), label="rotated", at=(422, 350))
    c.arrow((470, 375), (374, 375), dashed=True, label="queries.empty", at=(422, 390))
    for y, name in ((106, "tiles.full"), (188, "keys.full"), (268, "values.full"), (365, "queries.full")):
        c.arrow((650, y), (746, y), label=name, at=(698, y - 6))
    c.arrow((865, 414), (865, 462), (650, 462), label="O, rounded", at=(757, 455))
    c.arrow((470, 462), (144, 462), label="TMA store", at=(307, 455))
    c.text(192, 508, "solid: filled, and the full barrier tells whoever waits (tiles.full: rotate_queries too)",
           11, "start", muted=True)  # fmt: skip
    c.text(746, 508, "dashed: read, free to be filled again", 11, "start", muted=True)

    loads = [(204 * i, w, words) for i in range(3) for w, words in ((100, f"K {i + 1}, V {i + 1}"),)]
    starts = [102 * i for i in range(6)]
    lanes = [
        ("load", "plain", loads),
        ("rotate_queries", "gpu", [(0, 612, "rotates the queries of the next tile")]),
        ("attend 0", None, [(x, 102, "PS"[i % 2]) for i, x in enumerate(starts)]),
        ("attend 1", None, [(x, 102, "SP"[i % 2]) for i, x in enumerate(starts)]),
    ]
    timeline(c, 534, 246, "over time, within one tile", lanes)
    c.box(200, 746, 16, 16, [], "host", radius=3)
    c.text(224, 759, "products: scores of key block i, values of block i - 1", 12, anchor="start", muted=True)
    c.box(580, 746, 16, 16, [], "soft", radius=3)
    c.text(604, 759, "mask and softmax of key block i", 12, anchor="start", muted=True)
    return c.svg()


def timeline(c: Canvas, y: int, h: int, label: str, lanes) -> None:
    """Lanes of bars from left to right. A lane without a role holds "P" for products and "S" for softmax."""
    c.band(y, h, label)
    for i, (name, role, bars) in enumerate(lanes):
        top = y + 36 + i * 42
        c.text(180, top + 20, name, 13, anchor="end", bold=True)
        for x, w, words in bars:
            kind = role or {"P": "host", "S": "soft"}[words]
            words = {"P": "products", "S": "softmax"}.get(words, words)
            c.box(200 + x * 1.2, top, w * 1.2 - 2, 30, [words], kind, size=12, radius=4)


def backward(theme: str) -> str:
    """The sm_90 backward's main kernel: who fills which buffer, who empties it, and the order of the products."""
    c = Canvas(800, theme, "Warps, buffers and barriers of the sm_90 backward")
    c.band(10, 560, "global memory", x=10, w=150)
    c.band(10, 560, "one block owns 128 keys of one key head", x=172, w=818)
    c.text(300, 58, "warps that move", 12, muted=True, bold=True)
    c.text(560, 58, "shared memory", 12, muted=True, bold=True)
    c.text(865, 58, "warps that multiply", 12, muted=True, bold=True)
    c.group(746, 74, 238, 402)

    c.box(26, 84, 118, 44, ["K_rot, V", "once"], "plain")
    c.box(26, 166, 118, 44, ["Q_rot, lse", "64 rows"], "plain")
    c.box(26, 248, 118, 44, ["dO, delta", "64 rows"], "plain")
    c.box(26, 416, 118, 50, ["dQ", "float32, added to"], "plain")
    c.box(26, 506, 118, 44, ["dK, dV"], "plain")

    c.box(226, 76, 148, 226, ["load", "1 warp, 24 registers", "all of it by the TMA"], "warps")
    c.box(226, 404, 148, 74, ["reduce", "1 warp, 24 registers", "adds dQ by the TMA"], "warps")

    c.slots(470, 84, 180, 44, ["K", "V"])
    c.slots(470, 166, 180, 44, ["Q 0", "Q 1", "Q 2"])
    c.slots(470, 248, 180, 44, ["dO 0", "dO 1"])
    c.slots(470, 330, 180, 44, ["dS 0", "dS 1"])
    c.slots(470, 419, 180, 44, ["dQ, left", "dQ, right"])

    c.box(
        760,
        84,
        210,
        166,
        ["accumulate_by_keys 0", "warpgroup, 4 warps", "240 registers", "keys 0 to 63: dK, dV", "left columns of dQ"],
        "warps",
    )
    c.box(
        760,
        296,
        210,
        166,
        [
            "accumulate_by_keys 1",
            "warpgroup, 4 warps",
            "240 registers",
            "keys 64 to 127: dK, dV",
            "right columns of dQ",
        ],
        "warps",
    )

    c.arrow((144, 106), (226, 106))
    c.arrow((374, 106), (470, 106), label="TMA", at=(422, 100))
    c.arrow((650, 106), (746, 106), label="k.full, v.full", at=(698, 100))
    for y, name in ((188, "q"), (270, "do")):
        c.arrow((144, y), (226, y))
        c.arrow((374, y - 9), (470, y - 9), label="TMA", at=(422, y - 15))
        c.arrow((470, y + 10), (374, y + 10), dashed=True, label=f"{name}.empty", at=(422, y + 25))
        c.arrow((650, y), (746, y), label=f"{name}.full", at=(698, y - 6))
    c.arrow((746, 343), (650, 343), label="both store", at=(698, 337))
    c.arrow((650, 362), (746, 362), label="full, empty", at=(698, 377))
    c.arrow((746, 432), (650, 432), label="dQ", at=(698, 426))
    c.arrow((650, 451), (746, 451), dashed=True, label="dq.empty", at=(698, 466))
    c.arrow((470, 441), (374, 441), label="dq.full", at=(422, 435))
    c.arrow((226, 441), (144, 441), label="add", at=(196, 435))
    c.arrow(
        (865, 476),
        (865, 528),
        (144, 528),
        label="at the end, through the room of V and of dQ; dK is rotated back on its way",
        at=(505, 521),
    )

    c.band(584, 206, "one query block at D 128, in the order of issue (transposed: keys by queries)")
    steps = [
        ("P", "exp2(S - lse)", "soft"), ("dV", "+= P dO", "host"), ("dS", "P (dP - delta)", "soft"),
        ("dQ", "before: dS K", "host"), ("dK", "+= dS Q", "host"), ("S", "next: K Qᵀ", "host"),
        ("dP", "next: V dOᵀ", "host"),
    ]  # fmt: skip
    for i, (name, formula, role) in enumerate(steps):
        x = 30 + i * 137
        c.box(x, 632, 118, 62, [name, formula], role)
        if i:
            c.arrow((x - 19, 663), (x, 663))
    c.arrow((911, 694), (911, 716), (89, 716), (89, 694), dashed=True)
    c.box(30, 742, 16, 16, [], "host", radius=3)
    c.text(54, 755, "products on the tensor cores, in flight while the next step runs", 12, anchor="start", muted=True)
    c.box(520, 742, 16, 16, [], "soft", radius=3)
    c.text(544, 755, "arithmetic in registers; only dS goes through shared memory", 12, anchor="start", muted=True)
    return c.svg()


# Twelve tokens: (name, query_starts, query_ends). The guide docs/guides/intervals.md makes the same by ``masks``.
INTERVALS = (
    ("documents of 5, 4 and 3 tokens", tuple(range(12)), (5,) * 5 + (9,) * 4 + (12,) * 3),
    ("a prompt of 4, answers of 3, 2 and 3", tuple(range(12)), (12,) * 4 + (7,) * 3 + (9,) * 2 + (12,) * 3),
    ("prefix-LM, 5 of 12", (0,) * 5 + tuple(range(5, 12)), (12,) * 12),
    ("an image, tokens 3 to 7", (0, 1, 2, *(3,) * 5, 8, 9, 10, 11), (12,) * 12),
    ("chunks of 4", tuple(range(12)), (4,) * 4 + (8,) * 4 + (12,) * 4),
    ("causal, keys 4 to 6 hidden", (0, 1, 2, 3, 0, 0, 0, 7, 8, 9, 10, 11), (*(12,) * 4, 0, 0, 0, *(12,) * 5)),
)


def intervals(theme: str) -> str:
    """Masks of query rows by key columns, one bar for each key, and the two lines of their intervals."""
    c = Canvas(710, theme, "Masks, and the interval of query rows of each key")
    fill, stroke = c.colours["gpu"]
    blank, line = c.colours["plain"]
    size = 20
    for place, (name, starts, ends) in enumerate(INTERVALS):
        left, top = 60 + place % 3 * 320, 48 + place // 3 * 345
        c.text(left, top - 16, name, 13, anchor="start", bold=True)
        c.parts.append(
            f'<rect x="{left}" y="{top}" width="{12 * size}" height="{12 * size}" fill="{blank}" stroke="{line}"/>'
        )
        for key, (first, end) in enumerate(zip(starts, ends)):
            if first < end:
                c.parts.append(
                    f'<rect x="{left + key * size + 1}" y="{top + first * size}" width="{size - 2}" '
                    f'height="{(end - first) * size}" rx="4" fill="{fill}" stroke="{stroke}"/>'
                )
        c.text(left - 10, top + 6 * size, "rows", 11, anchor="end", muted=True)
        for i, (word, values) in enumerate((("starts", starts), ("ends", ends))):
            y = top + 12 * size + 22 + i * 22
            c.text(left - 8, y, word, 11, anchor="end", muted=True)
            for key, value in enumerate(values):
                c.text(left + key * size + 9, y, str(value), 11, mono=True)
    return c.svg()


if __name__ == "__main__":
    for draw in (call, forward, backward, intervals):
        for theme in THEMES:
            (HERE / f"{draw.__name__}-{theme}.svg").write_text(draw(theme), encoding="utf-8")
