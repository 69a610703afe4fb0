"""``python -m bench``: its command line, exit statuses, and the table of its commands."""

import re

import pytest
import torch

from baselines import BASELINES
from bench import __main__ as command
from bench.attention import cases, providers
from bench.attention.suite import ATTENTION, LOAD_USUAL
from bench.environment import RESULTS, ROOT, commit, environment
from tests.support.bench import TINY, WallClock, scripted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "no command nonsense; there are attention"),
        ("--cases nowhere", "no case fits 'nowhere'; groups are nineteen"),
        ("--providers nobody", "unknown provider nobody; there are fused"),
        ("--passes sideways", "--passes takes fwd, fwd_grad, bwd, both, not 'sideways'"),
        ("--round-ms 0", "--round-ms must be above 0, not 0"),
        ("--mode load,graph", "--mode load has a clock of its own: it takes no other mode with it"),
        ("rope --mode load", "--mode takes eager, graph, not 'load'"),
        ("decode --cases B3-", "no case fits 'B3-'; groups are b1, b8, b64, mixed, names B1-4K"),
        ("models --cases Gemma3+decode", "no case fits 'Gemma3+decode'"),
        ("results no-such-file --to attention-h200", "no-such-file"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    words = arguments.split()
    assert command.main(words if words[0] in ("nonsense", "results") else [*words, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, (_, entry) in command.COMMANDS.items() if entry != "main"])
def test_a_suite_lists_what_would_run_and_needs_a_gpu(name, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([name, "--dry-run"]) == 0
    cases_and_people = capsys.readouterr().out.split("\n\n")
    assert all(len(text.splitlines()) > 2 for text in cases_and_people) and len(cases_and_people) == 2
    assert command.main([name]) == 2 and "no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "listed", "left_out"),
    [
        ("--cases table", [*cases.TABLE, *providers.table("plain")], ["Host"]),
        ("--cases Small-1K", ["Small-1K"], ["Small-512"]),
        ("--cases LLAMA70B+1k,llama7b-2k --providers fused", ["Llama70B-1K", "Llama7B-2K"], ["Small", "hf_sdpa"]),
        ("--mode host", ["B1 H4 N128 D64 causal bf16", "bare_cudnn_chosen"], ["Small-512"]),
        ("--mode graph", ["Small-512"], ["\nHost "]),
        ("--mode graph,host", ["Small-512", "\nHost "], []),
        ("--mode load", [*cases.TABLE, *LOAD_USUAL], ["\nHost ", "hf_sdpa"]),
        ("rope --cases wide+bf16", ["Wide-256", "liger"], ["Llama3-8B"]),
        ("decode --cases B64", ["B64-128K", "rotate + write + FlashAttention-4"], ["B1-4K"]),
        ("models", ["Llama-3.2-1B", "Qwen3-0.6B", "prefill-16K", "liger"], []),
        ("mla", ["B1 H128 N4096x4096 D128+64/128 bfloat16", "compiled_fa4"], []),
        ("fa3", ["Llama3-8B-16K", "bare FA3, from JAX"], ["Long-64K"]),
    ],
)
def test_cases_and_providers_are_chosen(arguments, listed, left_out, capsys):
    assert command.main([*arguments.split(), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not [word for word in listed if word not in text] and not [word for word in left_out if word in text]
    for baseline in BASELINES.values() if "table" in arguments else ():
        assert (baseline.missing() or "here") in text


def test_providers_keep_the_order_of_the_table():
    found = ATTENTION.providers(cases.PLAIN[0], ["hf_sdpa", "fused", "nobody"])
    assert [provider.name for provider in found] == ["fused", "hf_sdpa"]


@pytest.mark.parametrize("name", ["", *command.COMMANDS])
def test_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "usage: python -m bench" in text and name in command.HELP
    if not name:
        assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 80, "it fits on one screen"


def test_suites_never_import_one_another():
    """Shared code is in files directly in ``bench``."""
    suites = {"attention", "mla", "rope", "decode", "models", "cp"}
    offenders = []
    for file in (ROOT / "bench").rglob("*.py"):
        imported = set(re.findall(r"(?:from|import) bench\.(\w+)", file.read_text(encoding="utf-8")))
        own = {file.parent.name, file.stem} if file.name != "docs.py" else suites
        offenders += [f"{file}: {name}" for name in (imported & suites) - own]
    assert not offenders


def test_of_several_ranks_the_first_writes_the_rows(measure, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert measure("attention", [TINY], [providers.OURS], "--mode", "eager") == (0, [])
    assert not capsys.readouterr().err


def raises(error):
    def run(*given):
        raise error

    return run


class Lost(WallClock):
    synchronize = raises(RuntimeError("an illegal memory access was encountered"))


@pytest.mark.parametrize(
    ("run", "clock", "status", "message"),
    [
        (lambda *given: 1.1 * providers.fused(*given), WallClock(), 1, "FAILED the gate"),
        (raises(RuntimeError("broken")), WallClock(), 1, "broken"),
        (raises(KeyboardInterrupt), WallClock(), 130, "0 rows in"),
        (providers.fused, Lost(), 3, "illegal memory access"),
    ],
)
def test_exit_statuses(measure, capsys, run, clock, status, message):
    assert measure("attention", [TINY], [scripted("fused", run, role="ours")], clock=clock)[0] == status
    assert message in capsys.readouterr().out


def test_facts_of_the_machine_and_the_tree(monkeypatch, tmp_path):
    """The commit comes from the environment where it is said: a copied tree may bring an older repository along."""
    monkeypatch.setenv("FUSED_ROPE_COMMIT", "0123abcd")
    facts = environment()
    assert {"gpu", "driver", "torch", "cuda", "cudnn", "triton", "packages", "commit", "date"} == set(facts)
    assert facts["commit"] == "0123abcd" and RESULTS.is_relative_to(ROOT)
    monkeypatch.delenv("FUSED_ROPE_COMMIT")
    assert commit() != "0123abcd"
    monkeypatch.setattr("bench.environment.ROOT", tmp_path)
    assert commit() == "unknown"
