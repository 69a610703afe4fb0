"""Sequences that a model is given in parts, with the cache between them."""

import torch
import transformers

# Ends of the parts of a sequence: one token and several, before, across and after the window's end. The last part is
# longer than the generation step takes.
ENDS = (5, 7, 10, 11, 13, 53)
CAPACITY = 56


def make_cache(model, kind):
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=CAPACITY)


def parts(model, past, ids, mask=None, ends=ENDS):
    """Logits of a sequence that the model is given in parts."""
    logits = []
    for start, end in zip((0, *ends), ends):
        part = None if mask is None else mask[:, :end]
        logits.append(model(ids[:, start:end], attention_mask=part, past_key_values=past).logits)
    return torch.cat(logits, dim=1)


def steps(model, past, ids, start):
    """Logits of the tokens from ``start`` on, one by one."""
    return torch.cat([model(ids[:, i : i + 1], past_key_values=past).logits for i in range(start, ids.shape[1])], dim=1)
