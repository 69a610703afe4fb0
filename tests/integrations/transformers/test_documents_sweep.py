"""Position ids that restart, jump, begin late or stay 0, in every served class: the unpatched model is the reference.

A model of transformers decides by its positions, its mask and its cache which tokens are documents of their own.
"""

from collections import Counter

import pytest
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers.families import convention_of
from tests.support import hf_sweep
from tests.support.hf_models import attentions_of
from tests.support.hf_sweep import CHOSEN, CLASSES, SETTINGS

every_class = pytest.mark.parametrize("name", CLASSES)
# Those that run their modules' own attention in some settings, and why.
OWN_ATTENTION = {
    "vision paligemma": "is_causal = False of the attention modules, which SDPA reads only without a mask,",
}


def check(name, settings):
    pair = hf_sweep.make_pair(name)
    # Releases before 5.23 run SDPA without the softcap that the config asks for.
    softcap = any(convention_of(module).softcap for module in attentions_of(pair[0]))
    if softcap and Version(transformers.__version__) < Version("5.23"):
        settings = [setting for setting in settings if setting.implementation == "eager"]
    outcomes = hf_sweep.compare(pair, settings)
    refused = {setting for setting in settings if setting.implementation == "sdpa" and not pair[0]._supports_sdpa}
    wrong = {
        setting: outcome.verdict
        for setting, outcome in outcomes.items()
        if outcome.verdict != ("refused" if setting in refused else "same")
    }
    assert not wrong
    reason = OWN_ATTENTION.get(name, "no fallback is expected")
    assert not [outcome.told for outcome in outcomes.values() if outcome.told and reason not in outcome.told]
    print(f"{name}: {dict(Counter(outcome.verdict for outcome in outcomes.values()))}")


@every_class
def test_chosen_settings(name):
    check(name, CHOSEN)


@pytest.mark.sweep
@every_class
def test_every_setting(name):
    check(name, SETTINGS)
