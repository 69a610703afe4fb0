"""Every row of the configuration table compiles for every card it names, and fits: shared memory, registers, spills."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.generation import configs as generation_configs
from tests.support.paths import python
from tools import aot
from tools.compile_kernels import DIRECTIONS, find_config, find_jobs, repeated_job

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """One run for all cards: two processes share the work, and this one may be the interpreter's."""
    file = tmp_path_factory.mktemp("aot") / "rows.json"
    result = python("-m", "tools.compile_kernels", "--json", str(file), timeout=1800)
    assert file.exists(), result.stdout + result.stderr
    return json.loads(file.read_text())["rows"]


@pytest.mark.parametrize("arch", configs.ARCHS)
def test_every_configuration_fits(compiled, arch):
    rows = [row for row in compiled if row["arch"] == arch]
    failures = [f"{row['job']}: {row.get('kernel', '')} {row['verdict']}" for row in rows if "FAIL" in row["verdict"]]
    assert not failures, "\n".join(failures)
    for row in rows:
        assert row["shared"] <= row["limit"]
        assert row["registers"] <= (512 if arch == "gfx942" else 255)
    assert any(row["job"].startswith("rotation ") for row in rows)
    decode = [row for row in rows if row["job"].startswith("decode ")]
    assert {" raw " in row["job"] for row in decode} == {False, arch in aot.THOROUGH}
    assert {row["kernel"] for row in decode} == {"decode_kernel", "combine_kernel"}
    # Loads of fewer than 16 bytes are not pipelined, and take hardly any shared memory.
    if arch == "sm_90":
        of_two_bytes = [row for row in decode if " bfloat16 " in row["job"] and " float8 " not in row["job"]]
        main = [row for row in of_two_bytes if row["kernel"] == "decode_kernel"]
        assert any(" D120 " in row["job"] for row in main) and all(row["shared"] > 32 << 10 for row in main)
    for title in ("backward prepass", "forward inline", *(["forward prepass"] if arch in aot.THOROUGH else [])):
        assert any(row["job"].startswith(f"{title} ") for row in rows), title


def tiles_of(config):
    portable = {"strategy": "inline", "tma": False} if hasattr(config, "strategy") else {}
    return replace(config, **portable, **({"section_bytes": 0} if hasattr(config, "section_bytes") else {}))


@pytest.mark.parametrize("arch", configs.ARCHS)
def test_no_row_is_left_out(arch):
    """The default leaves out features alone: every configuration that a call can get is compiled for that card, or for
    another card with the same code."""
    found, compiled = set(find_jobs(configs.ARCHS)), set()

    def is_compiled(job):
        return job in found or (job is not None and is_compiled(repeated_job(job)))

    for job in find_jobs([arch]):
        if hasattr(job, "direction") and hasattr(job, "config") and is_compiled(job):
            element_size = 1 if getattr(job, "float8", False) else job.dtype.itemsize
            compiled.add((job.direction, element_size, job.head_dim, tiles_of(job.config)))
    keys = itertools.product((2, 4), (64, 128, 192, 256), configs.STRATEGIES, configs.BUCKETS, (False, True))
    for element_size, head_dim, strategy, bucket, masked in keys:
        latent = head_dim == 192
        for direction in DIRECTIONS:
            if strategy == "prepass" or not latent:
                config = find_config(direction, arch, element_size, head_dim, strategy, bucket, masked, latent)
                assert (direction, element_size, head_dim, tiles_of(config)) in compiled, (direction, config)
    for row in generation_configs.DECODE:
        if arch in row.arch and not row.chunk:
            keys = [("decode", size, row.head_dim, row.config_on(arch)) for size in row.element_size]
            assert any(key in compiled for key in keys), row
    latent = [("forward", [hopper_configs.LATENT_FORWARD]), ("backward", [hopper_configs.LATENT_BACKWARD])]
    of_rotated = [("forward", hopper_configs.FORWARD), ("backward", hopper_configs.BACKWARD)]
    for direction, table in of_rotated + latent:
        for row in table if arch == "sm_90" else ():
            assert (direction, 2, row.head_dim, tiles_of(row.config)) in compiled, row


@pytest.mark.parametrize("arch", configs.ARCHS)
def test_the_table_answers_every_call(arch):
    """A configuration for every head dimension, element size, mask and length that validation admits."""
    sizes = itertools.product((2, 4), range(16, 257, 8))
    for size, strategy, bucket, masked in itertools.product(sizes, configs.STRATEGIES, configs.BUCKETS, (True, False)):
        key = (arch, *size, strategy, bucket, masked)
        assert find_config("forward", *key).strategy == strategy
        assert find_config("backward", *key).dkdv.block_n >= 16


def test_the_sm_90_backend_compiles_for_sm_90_alone(compiled):
    """Each pass with and without a causal mask, and no product that waits for another."""
    rows = [row for row in compiled if row["job"].startswith("hopper ")]
    assert {row["arch"] for row in rows} == {"sm_90"}
    for direction in ("forward", "backward"):
        found = [row for row in rows if row["job"].startswith(f"hopper {direction} bfloat16 D128 ")]
        main = [row for row in found if row["kernel"] == f"{direction}_kernel"]
        assert {" full " in row["job"] for row in main} == {False, True}, direction
        assert not any(row["serialised"] for row in main)


def test_no_product_of_a_rotation_is_left_for_the_compiler_to_fuse(compiled):
    """The loops of the inline forward fused another product than the code before them."""
    titles = ("forward ", "hopper forward ", "rotation ", "write ")
    rows = [row for row in compiled if row["arch"] == "sm_90" and row["job"].startswith(titles)]
    # The squares of two sections are added one after the other (docs/design/numerics.md).
    rows = [row for row in rows if not re.search("norm backward|two ids norm", row["job"])]
    rotating = [row for row in rows if row["kernel"] in ("forward_kernel", "prepass_kernel", "rotation_kernel")]
    rotating = [row for row in rotating if " R0 " not in row["job"]]
    rotating = [row for row in rotating if row["kernel"] != "forward_kernel" or "queries=False" not in row["job"]]
    assert len(rotating) >= 30 and all(row["fused"] for row in rotating)
    assert any(" norm" in row["job"] for row in rotating)
    assert not (found := [f"{row['job']}: {row['kernel']}" for row in rows if row["fusable"]]), found


def test_the_sm_90_tables_answer_every_call():
    head_dims, either = range(16, hopper_configs.HEAD_DIM + 1, 8), (True, False)
    for key in itertools.product(head_dims, either, configs.BUCKETS, either, either):  # causal, length, GQA, packed
        for find in (hopper_configs.forward_row, hopper_configs.backward_row):
            assert set(find(*key).least_work) <= set(configs.BUCKETS)
