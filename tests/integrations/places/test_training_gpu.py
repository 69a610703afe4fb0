"""Four layers of Llama 3.2 1B in bfloat16, by LitGPT and by torchtitan, unmodified and fused: losses and tokens/s.

make test-places                                                                  # makes the environment
.venv-places/bin/python -m pytest -m gpu -rP tests/integrations/places            # on a GPU, prints tokens/s
"""

import gc
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.paths import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]
ROWS, LENGTH, STEPS, WARM, LAYERS, TOKENS = 2, 4096, 50, 20, 4, 256


def train(model, logits_of, device="cuda", length=LENGTH):
    """Return the losses of a training on this repository's guides, byte by byte, and tokens/s after WARM steps."""
    pages = sorted(Path(ROOT, "docs", "guides").glob("*.md"))
    text = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))
    generator, losses = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    # Without it a difference of rounding in the first steps grows to .1.
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM, total_iters=WARM)
    for step in range(STEPS):
        if step == WARM:
            torch.accelerator.synchronize()
            begin = time.perf_counter()
        starts = torch.randint(len(text) - length - 1, (ROWS,), generator=generator)
        ids = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(logits_of(model, ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses).cpu()
    return losses, (STEPS - WARM) * ROWS * length / (time.perf_counter() - begin)


def compare(make, logits_of):
    """Train both ways from the same weights; print tokens/s, and hold the losses together."""
    results = {}
    for fused in (False, True):
        model = make(fused)
        generator = torch.Generator("cuda").manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        results[fused] = train(model, logits_of)
        del model
        gc.collect()
    (own, own_speed), (losses, speed) = results[False], results[True]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: own {own_speed:.0f} tokens/s, fused {speed:.0f}")
    assert losses[-1] < losses[0] - 1
    torch.testing.assert_close(losses, own, rtol=0, atol=1e-2)


def test_litgpt():
    pytest.importorskip("litgpt", reason="litgpt is not installed: make test-places")
    from litgpt.model import GPT

    from fused_rope_attn.integrations.litgpt import patch_model

    def make(fused):
        options = {"n_layer": LAYERS, "padded_vocab_size": TOKENS, "block_size": LENGTH}
        model = GPT.from_name("Llama-3.2-1B", **options).cuda()
        return patch_model(model) if fused else model

    compare(make, lambda model, ids: model(ids))


def test_torchtitan():
    """Its default, FlexAttention, is the unmodified attention. Rows are packed of four documents."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-places")
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import model_registry

    positions = torch.arange(LENGTH // 4, device="cuda").repeat(4).expand(ROWS, -1)

    def make(fused):
        config = model_registry("1B").model
        config.layers, config.vocab_size, config.enable_weight_tying = config.layers[:LAYERS], TOKENS, False
        config.tok_embeddings.num_embeddings = config.lm_head.out_features = TOKENS
        if fused:
            overrides = ["fused_rope_attn.integrations.torchtitan.fused_rope"]
            apply_overrides(OverrideConfig(imports=overrides), config)
        model = config.build()
        model.init_states()
        return model.cuda()

    def logits_of(model, ids):
        return model(ids, positions=positions, attention_masks=model.get_attention_masks(positions))

    compare(make, logits_of)
