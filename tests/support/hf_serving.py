"""transformers' continuous batching over tiny models, of 4.57 and of 5."""

import contextlib
from unittest import mock

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig
from transformers.generation.continuous_batching import cache as paged_cache

NEWER = Version(transformers.__version__) >= Version("5")
NEW_TOKENS = 10
# Prompts of this many tokens: single ones, parts of pages, and whole ones.
LENGTHS = (5, 17, 40, 1, 23, 33)


def prompts(lengths=LENGTHS, shared=32, seed=0):
    """Random tokens, and one more prompt that begins as the longest one does."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(2, 96, (length,), generator=generator).tolist() for length in lengths]
    return [*made, max(made, key=len)[:shared] + [5, 6, 7]]


def answers(model, given, implementation="eager", page=16, most_tokens=64, blocks=64, new=NEW_TOKENS, **options):
    """Return the answers of ``generate_batch``, a list of tokens for each prompt, in their order."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation if NEWER else f"{implementation}_paged")
    greedy = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1}
    try:
        if NEWER:
            config = options_of(page, most_tokens, blocks, **options)
            outputs = model.generate_batch(
                given, generation_config=GenerationConfig(**greedy), continuous_batching_config=config
            )
        else:
            config = GenerationConfig(**greedy)
            config.block_size, config.num_blocks, config.max_batch_tokens = page, blocks, most_tokens
            with _memory_of_a_cpu(model.device):
                outputs = model.generate_batch(given, generation_config=config, progress_bar=False)
    finally:
        model.set_attn_implementation(before)
    found = sorted(outputs.items(), key=lambda item: int(item[0].rsplit("_", 1)[1]))
    assert len(found) == len(given) and all(output.error is None for _, output in found), found
    return [output.generated_tokens for _, output in found]


def options_of(page=16, most_tokens=64, blocks=64, **options):
    """A ContinuousBatchingConfig, of transformers 5."""
    from transformers import ContinuousBatchingConfig

    fields = ContinuousBatchingConfig.__dataclass_fields__
    options["page_size" if "page_size" in fields else "block_size"] = page
    if "auto_switch_to_flash" in fields:
        options["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=most_tokens, **options)


def _memory_of_a_cpu(device):
    """4.57 asks how much memory a GPU has, and gets no number of a CPU."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    memory = (device, 1 << 40, 0, 0)
    return mock.patch.object(paged_cache, "get_device_and_memory_breakdown", lambda: memory)
