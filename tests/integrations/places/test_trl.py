"""TRL's trainers with a patched model: supervised training on packed documents, and GRPO with its own generation.

Run by `make test-places`, in an environment that has TRL.
"""

import string

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: make test-places")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from fused_rope_attn.integrations.transformers import patch_model, patch_report

pytestmark = [
    pytest.mark.unpoisoned,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
TEXTS = ["abc def gh", "the quick brown fox jumps", "hello world", "lorem ipsum dolor sit amet"] * 8
COMMON = {"report_to": [], "logging_steps": 1, "use_cpu": True, "bf16": False, "save_strategy": "no", "seed": 0}


def make():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    words = ["<pad>", "<s>", "</s>", " ", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def assert_same(make_trainer):
    """Losses, rewards and norms of the gradients of all steps. Gradient checkpointing, which is on by default, calls
    attention twice in each."""

    def train(patched):
        trainer = make_trainer(*make())
        if patched:
            patch_model(trainer.model)
        trainer.train()
        if patched:
            assert all(row.served > trainer.args.max_steps and not row.own for row in patch_report(trainer.model))
        rows = [row for row in trainer.state.log_history if "loss" in row]
        return torch.tensor([[row.get(name, 0.0) for name in ("loss", "reward", "grad_norm")] for row in rows])

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_supervised_training_on_packed_documents(tmp_path, strategy):
    """Best-fit packing passes positions that restart; wrapping cuts documents anywhere."""
    options = {"packing_strategy": strategy, "padding_free": strategy == "bfd", "max_length": 48, "max_steps": 5}
    options |= {"packing": True, "per_device_train_batch_size": 2, "learning_rate": 1e-3} | COMMON
    args, data = SFTConfig(output_dir=str(tmp_path), **options), Dataset.from_dict({"text": TEXTS})
    assert_same(lambda model, words: SFTTrainer(model=model, args=args, train_dataset=data, processing_class=words))


def test_grpo(tmp_path):
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "max_steps": 3}
    args = GRPOConfig(output_dir=str(tmp_path), learning_rate=1e-2, beta=0.0, **sizes, **COMMON)
    given = {"args": args, "train_dataset": Dataset.from_dict({"prompt": TEXTS})}
    given["reward_funcs"] = lambda completions, **_: [len(set(text)) / 10 for text in completions]
    assert_same(lambda model, words: GRPOTrainer(model=model, processing_class=words, **given))
