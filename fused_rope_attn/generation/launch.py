# mypy: disable-error-code="attr-defined, arg-type"
"""The operators of the generation step, which write the caches that they are given and have no gradient, and their
launches: of a step in one of three forms, and of writes alone."""

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.configs import ForwardConfig, HopperForwardConfig
from fused_rope_attn.attention.hopper import forward as hopper
from fused_rope_attn.attention.portable import forward as portable
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.generation import cache_kernels, inputs, kernel, ordered_kernels, ordered_tiles, planning
from fused_rope_attn.generation.configs import DECODE_ROWS, DecodeConfig, OrderedConfig
from fused_rope_attn.generation.problem import STEP, WRITE, StepTensors, Written, cache_of
from fused_rope_attn.kernels.schedule import tile_count
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime import device, layouts
from fused_rope_attn.runtime.launch import Launch, call_of
from fused_rope_attn.runtime.registration import Operator, is_plain

# The launches of one signature: they take the tensors of a call and return its results.
Call = Callable[..., Any]


def row_block(rows: int, least: int = 16, most: int = DECODE_ROWS) -> int:
    """Return BLOCK_M for a head's query rows: at least a tensor core's 16, at most as many as registers hold."""
    return min(most, max(least, 1 << (rows - 1).bit_length()))


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether every row of x begins at a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in x.stride()[:3])


def can_copy(given: StepTensors | Written) -> bool:
    """Return whether the caches' rows can be copied 16 bytes at a time."""
    return all(x.stride(3) == 1 and has_aligned_rows(x) for x in (given.k_cache, given.v_cache))


def tile_alignment(page_size: int | None, block_n: int, by_page: bool) -> int:
    """Return ALIGNMENT of tiles of ``block_n`` keys in pages: 1 if a tile may begin within a page and end outside."""
    if page_size is None:
        return 1
    if page_size % block_n == 0:
        return block_n
    return page_size if by_page and block_n % page_size == 0 else 1


def numbers_of(problem: Problem, given: StepTensors | Written) -> dict[str, Any]:
    """Return the numbers of a call for which kernels are not compiled again, by the kernels' names."""
    return arguments.numbers_of(problem) | {
        "B": problem.batch,
        "S": problem.len_k,
        "num_pages": None if given.block_table is None else given.k_cache.shape[0],
        "position_limit": arguments.table_rows(given),
    }


def asserts_of(given: StepTensors | Written) -> dict[str, Any]:
    """Return the launch options that keep the assertion that a page is in the pool; kernels have no others."""
    return {} if given.block_table is None else {"debug": True}


def columns_of(pad_d: int, *rows: Any) -> tuple[int, bool]:
    """Return (padded columns, whether offsets within a tile need 64 bits) for tensors, or strides, of rows."""
    strides = [x.stride() if isinstance(x, torch.Tensor) else x for x in rows if x is not None]
    return pad_d, layouts.is_long(*strides)


def cache_inputs(problem: Problem, tensors: StepTensors | Written, columns: tuple[int, bool]) -> Any:
    """Return the ``CacheInputs`` of a call. columns: of ``columns_of``."""
    k_cache, v_cache, table = tensors.k_cache, tensors.v_cache, tensors.block_table
    if table is not None:
        table = inputs.running.BlockTable.host(table, table.stride(), PAGE_SIZE=k_cache.shape[2])
    k_scales, v_scales = (
        arguments.view(x, (0,) if x is None or x.numel() == 1 else None) for x in (tensors.k_scale, tensors.v_scale)
    )
    product_dtype = tl.float32 if problem.dtype is torch.float32 else tl.float16
    is_aligned = has_aligned_rows(k_cache) and has_aligned_rows(v_cache)
    return inputs.CacheInputs.host(
        k=arguments.view(k_cache),
        v=arguments.view(v_cache),
        table=table,
        k_scales=k_scales,
        v_scales=v_scales,
        IS_ROTATED=cache_of(problem).is_rotated,
        FLOAT8_DTYPE=product_dtype if cache_of(problem).is_float8 else None,
        IS_ALIGNED=is_aligned and k_cache.stride(3) == v_cache.stride(3) == 1,
        format=RowFormat.host(problem.head_dim, *columns, ALIGNED=is_aligned),
    )


def step_inputs(problem: Problem, tensors: StepTensors, lengths: dict[str, Any], columns: tuple[int, bool]) -> Any:
    """Return the ``StepInputs`` of a call. lengths: compile-time fields of ``Caches``."""
    return inputs.StepInputs.host(
        q=arguments.view(tensors.q),
        k=arguments.view(tensors.k),
        v=arguments.view(tensors.v),
        cache=cache_inputs(problem, tensors, columns),
        lengths=inputs.Caches.host(tensors.cache_seqlens, tensors.kv_starts, **lengths),
        rotations=arguments.rotation_of(problem, tensors, inline=True),
        scale=arguments.scale_of(problem),
        format=RowFormat.host(problem.head_dim, *columns),
    )


def outputs_of(tensors: StepTensors, o_strides: tuple[int, ...]) -> Any:
    """Allocate the results of a step and return its ``StepOutputs``, and o and lse."""
    q = tensors.q
    o = torch.empty_strided(q.shape, o_strides, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return inputs.StepOutputs.host(arguments.view(o), lse, tensors.sinks), (o, lse)


def launch_by_tiles(
    function: Any, problem: Problem, given: StepTensors | Written, tiles: int, block_t: int, pdl: bool, **numbers: int
) -> Launch:
    """Return the launch of a kernel in which a program takes one of ``tiles`` tiles of tokens, of up to 4 key heads."""
    heads = min(4, problem.heads_kv)
    programs = -(-problem.heads_kv // heads) * tiles * problem.batch
    options, blocks = {"num_warps": 4, **asserts_of(given)}, {"BLOCK_T": block_t, "HEADS": heads, "PDL": pdl}
    return Launch(function, programs, options, numbers_of(problem, given) | numbers, num_tiles=tiles, **blocks)


def step_call(problem: Problem, given: StepTensors, config: DecodeConfig) -> Call:
    """Return a signature's launches: each program attends to its share of all key tiles, then the parts are added."""
    q, cache = given.q, cache_of(problem)
    group_rows = problem.len_q * problem.group_size
    block_m, block_n = row_block(group_rows, most=config.block_m or DECODE_ROWS), config.block_n
    # Products have half the columns of float8 caches at a time, and at least 16.
    pad_d = max(32 if cache.is_float8 else 16, layouts.block_d(problem.head_dim))
    is_chunk = config.block_m is not None
    many_rows = block_m == DECODE_ROWS and not is_chunk  # their sums leave fewer registers for scores
    options = {**config.launch_options}
    if many_rows:  # so many rows of sums take the registers of twice as many threads
        block_n = min(block_n, 64)
        options["num_warps"] = max(8, config.num_warps)
    all_rows = problem.batch * problem.heads_kv * group_rows
    new_with_parts = cache.appends and not is_chunk and all_rows <= config.rows_apart
    if new_with_parts and config.registers_apart is not None and not many_rows:
        options["maxnreg"] = config.registers_apart
    at_once = max(1, config.programs_per_sm * config.num_warps // options["num_warps"])
    heads = problem.batch * problem.heads_kv * -(-group_rows // block_m)
    # No more programs than there can be shares.
    most = heads * max(1, -(-problem.len_k // block_n))
    programs = min(at_once * device.num_sms(q.device), most)
    o_strides = layouts.output_strides(q)
    whole_parts = heads if new_with_parts else 0
    workspace = (2 * programs + whole_parts) * block_m * (problem.head_dim + 2)
    lengths = {
        "HAS_NEW_KEYS": cache.appends,
        "BLOCK_N": block_n,
        "BLOCK_B": 32 if problem.batch <= 32 else 256,
        "ALIGNMENT": tile_alignment(cache.page_size, block_n, config.by_page),
        "ONE_PASS": problem.batch <= 32,
    }
    columns = columns_of(pad_d, q, given.k_cache, given.v_cache, o_strides, given.k, given.v)
    shared = numbers_of(problem, given) | {
        "programs": programs,
        "BLOCK_M": block_m,
        "BLOCK_NEW": min(64, block_n) if is_chunk else 16,
        "NEW_WITH_PARTS": new_with_parts,
        "PDL": config.pdl,
    }
    attend = Launch(kernel.decode_kernel, programs, options | asserts_of(given), shared, IS_CHUNK=is_chunk)
    options = {"num_warps": 4, **({"launch_pdl": True} if config.pdl else {}), **asserts_of(given)}
    combine = Launch(kernel.combine_kernel, all_rows, options, shared, BLOCK_PARTS=config.combine_parts)

    def call(tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, results = outputs_of(tensors, o_strides)
        named = {
            "inputs": step_inputs(problem, tensors, lengths, columns),
            "outputs": outputs,
            "parts_ptr": torch.empty(workspace, dtype=torch.float32, device=tensors.q.device),
        }
        for launch in (attend, combine):
            launch(device.current_stream(tensors.q.device), named)
        return results

    return call


def write_call(problem: Problem, given: StepTensors | Written, pdl: bool = False) -> Call:
    """Return the launch of one signature that puts new keys and values into a cache.

    pdl: the next launch may begin early, and waits for this one.
    """
    block_t = 16 if device.is_interpreted() else 32
    tiles = tile_count(problem.len_q, problem.sequences, block_t)
    columns = columns_of(layouts.block_d(problem.head_dim), given.k, given.v, given.k_cache, given.v_cache)
    launch = launch_by_tiles(cache_kernels.write_kernel, problem, given, tiles, block_t, pdl)

    def call(tensors: StepTensors | Written, sums: torch.Tensor | None = None) -> None:
        """sums: as ``write_kernel`` writes them."""
        written = cache_kernels.WriteInputs.host(
            k=arguments.view(tensors.k),
            v=arguments.view(tensors.v),
            cache=cache_inputs(problem, tensors, columns),
            tables=arguments.tables_of(problem, tensors),
            k_norm=arguments.norm_of(problem, getattr(tensors, "k_norm", None)),
            seqlens_ptr=tensors.cache_seqlens,
            new_lens_ptr=getattr(tensors, "new_lens", None),
            cu_seqlens_ptr=getattr(tensors, "cu_seqlens", None),
            sums_ptr=sums,
            format=RowFormat.host(problem.head_dim, *columns),
        )
        launch(device.current_stream(tensors.k.device), inputs=written)

    return call


def gathered_call(problem: Problem, given: StepTensors, config: HopperForwardConfig | ForwardConfig) -> Call:
    """Return the launches of a step by the kernels of attention, on a contiguous copy of the cached keys that it sees.

    Chunks of prompts run so on sm_90, and all steps that are to give the bits of attention to the whole sequence and
    have no ``ordered_call``. Attention reads each block of keys once for every tile of query rows, and loads keys
    through the TMA, which follows no block table. One launch writes the new tokens into the cache, one gathers the
    visible keys, in pair order, and the visible values, attention does the rest, and one clears the rows of tokens past
    the end of the cache.
    """
    q, v_cache, cache = given.q, given.v_cache, cache_of(problem)
    is_hopper = isinstance(config, HopperForwardConfig)
    reads_cache = is_hopper and cache.page_size is None and not cache.is_float8 and layouts.has_descriptor(v_cache)
    attention = planning.attention_problem(problem)
    # The portable kernels also read rows of new tokens past the end of the cache. The TMA has zeros there.
    rows = problem.len_k if is_hopper else attention.len_k
    shape = (problem.batch, problem.heads_kv, rows, problem.head_dim)
    write = write_call(problem, given) if cache.appends else None
    like = q.new_empty(shape)
    of_attention: Any = hopper.ForwardCall if is_hopper else portable.ForwardCall
    seen = seen_tensors(given, like, v_cache if reads_cache else like, given.cache_seqlens)
    attend = of_attention(attention, seen, config, keys_are_ready=True)
    pad_d = layouts.block_d(problem.head_dim)
    columns = columns_of(pad_d, given.k_cache, v_cache, layouts.contiguous_strides(shape))
    gather, tiles = cache_kernels.gather_kernel, tile_count(problem.len_k, None, 32)
    gather = launch_by_tiles(gather, problem, given, tiles, 32, config.pdl, NK=attention.len_k)
    numbers, row_format = numbers_of(problem, given), {"D": problem.head_dim, "BLOCK_D": pad_d}
    heads = problem.batch * problem.heads_q
    clear = Launch(cache_kernels.clear_kernel, heads, {"num_warps": 1}, numbers, **row_format)

    def call(tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        lens, on = tensors.cache_seqlens, tensors.q.device
        stream = device.current_stream(on)
        if write is not None:
            lens = torch.empty(problem.batch, dtype=torch.int32, device=on)
            write(tensors, sums=lens)
        keys = torch.empty(shape, dtype=problem.dtype, device=on)
        values = None if reads_cache else torch.empty(shape, dtype=problem.dtype, device=on)
        if values is not None and problem.len_k < rows:
            values[:, :, problem.len_k :].zero_()
        counter = torch.empty(hopper.COUNTER_WORDS, dtype=torch.int32, device=on)
        gather(
            stream,
            cache=cache_inputs(problem, tensors, columns),
            k=arguments.view(keys),
            v=arguments.view(values),
            tables=arguments.tables_of(problem, tensors),
            lens_ptr=lens,
            kv_starts_ptr=tensors.kv_starts,
            counter_ptr=counter,
        )
        seen = seen_tensors(tensors, keys, tensors.v_cache if values is None else values, lens)
        o, lse, *_ = attend(seen, counter=counter) if is_hopper else attend(seen)
        if write is not None:
            clear(stream, lens_ptr=lens, o=arguments.view(o), lse_ptr=lse)
        return o, lse

    return call


def seen_tensors(given: StepTensors, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Tensors:
    """Return the tensors of attention to gathered keys."""
    weights = {"q_norm": given.q_norm, "k_norm": given.k_norm}
    return Tensors(
        layouts.with_aligned_rows(given.q), k, v, given.cos, given.sin, given.sinks, given.kv_starts, lens, **weights
    )


def ordered_call(problem: Problem, given: StepTensors, config: OrderedConfig) -> Call:
    """Return the launches of a step that gives the bits of the sm_90 forward, which ``ordered_tiles`` explains.

    They write the new tokens, rotate the queries, and run one loop over the tiles for each unit, or if there are few
    units, scores and values.
    """
    q, cache = given.q, cache_of(problem)
    rows, block_n = problem.len_q * problem.group_size, config.block_n
    block_r = row_block(rows, least=8)
    units = problem.batch * problem.heads_kv * -(-rows // block_r)
    seen = problem.len_k
    if problem.window_left is not None:  # a window begins and ends within a tile
        seen = min(seen, problem.window_left + problem.len_q + block_n)
    most_tiles = max(1, -(-seen // block_n))
    pad_d = max(64, layouts.block_d(problem.head_dim))
    o_strides = layouts.output_strides(q)
    columns = columns_of(pad_d, q, given.k_cache, given.v_cache, o_strides)
    lengths = {"HAS_NEW_KEYS": cache.appends, "BLOCK_N": block_n, "IN_ORDER": True}
    write = write_call(problem, given, pdl=True) if cache.appends else None
    # Those of a unit's scores, and as many of its values if there are enough columns.
    programs = min(max(1, config.programs // units), ordered_tiles.MOST_PROGRAMS.value, most_tiles)
    shared = numbers_of(problem, given) | {
        "most_tiles": most_tiles,
        "programs": programs,
        "BLOCK_R": block_r,
        "PDL": True,
    }
    overlaps = {"launch_pdl": True}
    # It may overlap with the write alone: other launches before it may have made its inputs.
    options = {"num_warps": 4, **asserts_of(given), **(overlaps if cache.appends else {})}
    launches = [Launch(ordered_tiles.query_kernel, units, options, shared)]
    buffers: list[tuple] = [((units, block_r, pad_d), q.dtype)]
    # With more rows the sums of wide heads take more registers than a thread has.
    if units >= config.least_units and block_r <= 32:
        stage = 2 * block_n * pad_d * q.element_size()
        stages = min(config.most_stages, (220 * 1024 - 12 * block_r * block_n - 2 * block_r * pad_d) // stage)
        # Products of two warpgroups have 128 rows at least.
        warps = 8 if min(block_n, pad_d) >= 128 else 4
        options, sizes = {"num_warps": warps, **overlaps}, {"STAGES": stages, "WARPS": warps}
        launches.append(Launch(ordered_kernels.attend_kernel, units, options, shared, **sizes))
    else:
        of_tile = (units, most_tiles, min(rows, block_r))
        buffers += [((*of_tile, block_n), torch.float32), (of_tile, torch.float32)]
        buffers.append(((units, ordered_tiles.MOST_PROGRAMS.value), torch.int32))
        options = {"num_warps": 4, **overlaps}
        stages = min(config.most_stages, (220 * 1024 - 2 * block_r * pad_d) // (2 * block_n * pad_d))
        scores = Launch(ordered_kernels.score_kernel, units * programs, options, shared, STAGES=stages)
        width = max(config.least_columns, min(pad_d, 128) // (1 << (programs.bit_length() - 1)))
        step = max(1, min(config.step_rows // block_r, 1 << (programs.bit_length() - 1)))
        slots = 3 if step * block_r <= 32 else 2
        room = 222 * 1024 - step * block_r * (slots * 4 * block_n + 2 * 2 * block_n + 64)
        stages = min(config.value_stages, room // (2 * block_n * max(64, width)))
        sizes = {"COLUMNS": width, "STEP": step, "SCORE_SLOTS": slots, "STAGES": stages}
        adders = units * -(-problem.head_dim // width)
        launches += [scores, Launch(ordered_kernels.value_kernel, adders, options, shared, **sizes)]

    def call(tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        on = tensors.q.device
        if write is not None:
            write(tensors)
        outputs, results = outputs_of(tensors, o_strides)
        workspaces = [torch.empty(shape, dtype=dtype, device=on) for shape, dtype in buffers]
        named = {
            "inputs": step_inputs(problem, tensors, lengths, columns),
            "outputs": outputs,
            "workspaces": ordered_tiles.Workspaces.host(*workspaces),
        }
        for launch in launches:
            launch(device.current_stream(on), named)
        return results

    return call


def prepare_step(problem: Problem, tensors: StepTensors, override: DecodeConfig | None) -> Call:
    """Return the launches of a step, by the configuration that planning chooses, or by ``override``."""
    config = override or planning.step_config(problem, can_copy(tensors))
    calls: dict[type, Callable[..., Call]] = {DecodeConfig: step_call, OrderedConfig: ordered_call}
    return calls.get(type(config), gathered_call)(problem, tensors, config)


# Kernels index these with unit stride; they nearly always have it.
_WITH_UNIT_STRIDE = ("cache_seqlens", "kv_starts", "sinks", "q_norm", "k_norm", "new_lens", "cu_seqlens")


def _run(prepare: Callable, problem: Problem, tensors: StepTensors | Written, *more: Any) -> Any:
    """Run the launches of a call's signature."""
    for name in _WITH_UNIT_STRIDE:
        x = getattr(tensors, name, None)
        if x is not None and not x.is_contiguous():
            tensors = tensors._replace(**{name: x.contiguous()})
    with device.guard(problem.device):
        out = call_of(prepare, problem, tensors, *more)(tensors)
    if tensors.k is not None and not tensors.k_cache.is_inference():
        # Autograd should know if it has saved a cache that is another one now.
        torch.autograd.graph.increment_version((tensors.k_cache, tensors.v_cache))
    return out


def _step(problem: Problem, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.batch * problem.len_q == 0:
        return _like_results(tensors.q)
    return _run(prepare_step, problem.with_precision(), tensors, planning.override)


def _like_results(q: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layouts.like_input(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _write(problem: Problem, tensors: Written) -> None:
    if tensors.k.numel() > 0:
        _run(write_call, problem, tensors)


_step_operator = Operator(
    f"attention_with_kvcache({STEP.schema}) -> (Tensor, Tensor)",
    run=lambda *arguments: _step(*STEP.rebuild(*arguments)),
    fake=_like_results,
    function="rope_attention_with_kvcache",
)
_write_operator = Operator(
    f"write_kvcache({WRITE.schema}) -> ()",
    run=lambda *arguments: _write(*WRITE.rebuild(*arguments)),
    fake=lambda *arguments: None,
    function="write_kvcache",
)


def launch_step(problem: Problem, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of a step that planning has admitted. Ordinary eager calls skip the dispatcher."""
    return _step(problem, tensors) if is_plain(*tensors) else _step_operator(*STEP.flatten(problem, tensors))


def launch_write(problem: Problem, tensors: Written) -> None:
    """Write k and v into the caches, as ``choose_step_backend`` has admitted it."""
    if is_plain(*tensors):
        _write(problem, tensors)
    else:
        _write_operator(*WRITE.flatten(problem, tensors))
