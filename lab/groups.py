VF, PIN = {"values_first": True}, {"pin": True}
O19, LATE = {"order": 19}, {"values_first": False}
B, C = "aa8d341", "62ae95e"
ABC = {"A": ("A", {}), "B": (B, {}), "C": (C, {})}
N = {**ABC, "D19": ("D", O19)}
GROUPS = {
    "first": {
        "Llama7B-full-1K": {**ABC, "A-vf": ("A", VF), "C-vf": (C, VF)},
        "Small-full-1K": N,
        "Llama7B-4K": ABC,
        "Llama3-8B-16K": ABC,
        "Phi3-4K": {**ABC, "D19-late": ("D", {**O19, **LATE}), "D19-late-pin": ("D", {**O19, **LATE, **PIN})},
        "Small-4K": N,
        "Small-8K": N,
        "Llama70B-1K": ABC,
        "Llama7B-2K": ABC,
        "Phi3-1K": {**ABC, "D19": ("D", O19)},
        "Llama70B-512": ABC,
        "Small-2K": {"A": ("A", {}), "C": (C, {}), "D19": ("D", O19)},
        "Gemma-4K": ABC,
        "Llama7B-full-4K": ABC,
    },
}
five = {"A": ("A", {}), "B": (B, {}), "t": ("t", {}), "q": ("q", {}), "C": (C, {})}
def nar(extra):
    return {"A": ("A", {}), "B": (B, {}), **{t: (t, {**O19, **extra}) for t in ("DB", "Dt", "Dq", "D")}, "D17": ("D", {"order": 17, **extra}), "D18": ("D", {"order": 18, **extra})}
GROUPS["second"] = {
    "Llama3-8B-16K": five,
    "Llama7B-4K": five,
    "Llama70B-1K": five,
    "Llama7B-full-1K": {**five, "q-vf": ("q", VF), "t-vf": ("t", VF), "B-vf": (B, VF)},
    "Phi3-4K": nar(LATE),
    "Small-8K": nar({}),
    "Small-4K": nar({}),
    "Small-full-1K": nar({}),
    "Phi3-1K": nar(LATE),
    "Small-2K": nar({}),
    "Llama7B-2K": five,
    "Llama70B-512": five,
}
def o(n, **extra):
    return ("Dt", {"order": n, **extra})
THREE = {"consumers": 3, "rotates_queries": False, "attend_registers": 160, "rotate_heads": 4, "halves_diagonal": False}
TWO = {"consumers": 2, "stages": 2, "rotates_queries": True, "attend_registers": 208, "rotate_heads": 1, "halves_diagonal": True}
AT = {"A": ("A", {}), "t": ("t", {}), "T18": o(18), "T2": o(2)}
GROUPS["third"] = {
    "Llama7B-full-1K": {**AT, "t-vf": ("t", VF), "t-pin": ("t", PIN), "T17": o(17)},
    "Llama7B-4K": AT,
    "Llama3-8B-16K": AT,
    "Phi3-4K": {"A": ("A", {}), "T18": o(18, **LATE), "T2": o(2, **LATE), "T18-pin": o(18, **LATE, **PIN), "T18-three": o(18, **LATE, **THREE), "T18-whole": o(18, **LATE, halves_diagonal=False)},
    "Small-8K": {"A": ("A", {}), "T18": o(18), "T2": o(2), "T18-two": o(18, **TWO), "t": ("t", {})},
    "Small-4K": {"A": ("A", {}), "T18": o(18), "T2": o(2), "T18-three": o(18, **THREE, stages=3), "T18-whole": o(18, halves_diagonal=False)},
    "Small-full-1K": {"A": ("A", {}), "t": ("t", {}), "T18": o(18), "T2": o(2), "T18-s3": o(18, stages=3)},
    "Phi3-1K": {"A": ("A", {}), "t": ("t", {}), "T18": o(18, **LATE), "T2": o(2, **LATE), "T18-halves": o(18, **LATE, halves_diagonal=True)},
    "Small-2K": {"A": ("A", {}), "T18": o(18), "T2": o(2)},
    "Small-1K": {"A": ("A", {}), "T18": o(18, **LATE, halves_diagonal=True)},
    "Phi3-8K": {"A": ("A", {}), "t": ("t", {}), "T18": o(18, **LATE), "T18-two": o(18, **LATE, **TWO)},
    "Llama70B-1K": AT,
    "Llama7B-full-4K": AT,
    "Gemma-4K": {"A": ("A", {}), "t": ("t", {})},
    "Long-64K": {"A": ("A", {}), "t": ("t", {})},
    "Llama70B-512": {"A": ("A", {}), "t": ("t", {}), "T18": o(18)},
}
E = {"A": ("A", {}), "t": ("t", {}), "T32": o(32), "T32-nopin": o(32, pin=False)}
GROUPS["fourth"] = {
    "Llama3-8B-16K": E, "Llama7B-4K": E, "Llama7B-full-4K": E, "Llama7B-2K": E,
    "Gemma-4K": {"A": ("A", {}), "t": ("t", {}), "T32": o(32)},
    "Llama7B-full-1K": {"A": ("A", {}), "t": ("t", {}), "T32": o(32), "T18": o(18), "t-vf": ("t", VF), "T18-pin": o(18, pin=True)},
    "Llama70B-1K": {"A": ("A", {}), "t": ("t", {}), "T32": o(32), "T18": o(18), "T18-pin": o(18, pin=True)},
    "Small-8K": {"A": ("A", {}), "T18": o(18), "T32": o(32), "T18-pin": o(18, pin=True)},
}
AO = {"A": ("A", {}), "old": ("old", {})}
GROUPS["final"] = {n: AO for n in ("Small-8K", "Small-full-8K", "Phi3-8K", "Phi3-full-8K", "Gemma-4K", "Phi3-4K", "Llama7B-full-1K", "Llama7B-full-4K", "Small-full-1K", "Llama3-8B-16K", "Llama7B-1K", "Llama7B-512", "Llama70B-512", "Gemma-1K")}
