"""Train a small Llama on long sequences that several processes share: the loss curve of one process, on each of them.

    torchrun --nproc-per-node 4 examples/train_long.py                  # 4 GPUs, sequences of 64K tokens
    torchrun --nproc-per-node 2 examples/train_long.py --packed         # documents, cut so that all have equal work
    torchrun --nproc-per-node 2 examples/train_long.py --small          # on a CPU, by gloo
    python examples/train_long.py --small                               # one process, whole sequences

Each run writes its losses, tokens per second and peak memory to a file, train_long-P.json, and draws all that it finds:
curves of 1, 2 and 4 processes lie on one another. FSDP2 shards the weights over the same processes, and adds their
gradients up. The text is this repository's notes on its experiments, byte by byte. Needs the extra `hf`, and matplotlib
for the plot.
"""

import argparse
import json
import os
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--length", type=int, help="tokens of a sequence; default 65536, with --small 256")
parser.add_argument("--steps", type=int, default=60, help="of training")
parser.add_argument("--packed", action="store_true", help="documents of random lengths instead of one text")
parser.add_argument("--sharding", metavar="NAME", help="zigzag, contiguous or, the default with --packed, balanced")
parser.add_argument("--small", action="store_true", help="a model that a CPU can train, on the CPU")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses and of the plot")
args = parser.parse_args()

# Behind the arguments, so that --help needs none of them.
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

from fused_rope_attn.distributed import cp_shard, cp_shift_labels, plan_varlen_cp  # noqa: E402
from fused_rope_attn.integrations.transformers import patch_model  # noqa: E402

# %% the processes: torchrun says who they are, and one mesh serves the sequences and the weights
device = "cpu" if args.small else "cuda"
rank, local_rank, size = (
    int(os.environ.get(name, at)) for name, at in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
)
if device == "cuda":
    torch.cuda.set_device(local_rank)
if "RANK" in os.environ:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
else:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh(device, (size,), mesh_dim_names=("cp",))
sharding = args.sharding or ("balanced" if args.packed else "zigzag")

layers, width, heads = (2, 64, 4) if args.small else (8, 1024, 16)
length = args.length or (256 if args.small else 65536)

# %% the text: one token a byte, the same batches on every rank, each the whole sequence
text = torch.tensor(list(b"".join(file.read_bytes() for file in sorted((ROOT / "docs").rglob("*.md")))))


def batches():
    """(ids (1, N), where documents begin and end) of every step."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        if args.packed:
            limits = [0]
            while limits[-1] < length:
                document = int(2 ** (torch.rand((), generator=generator) * 5 + 4)) * max(1, length // 2048)
                limits.append(min(length, limits[-1] + document))
        else:
            limits = [0, length]
        pieces = []
        for begin, end in zip(limits, limits[1:]):
            start = int(torch.randint(len(text), (), generator=generator))
            pieces.append(text.roll(-start).repeat(-(-(end - begin) // len(text)))[: end - begin])
        yield torch.cat(pieces)[None].to(device), torch.tensor(limits, device=device)


# %% the model: patched for the group, then sharded by FSDP2 over the same processes
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=width,
    intermediate_size=4 * width,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=heads // 2,
    max_position_embeddings=length,
    tie_word_embeddings=True,
    rope_theta=500000.0,
    attn_implementation="sdpa",
    bos_token_id=None,
    eos_token_id=None,
)
model = transformers.LlamaForCausalLM(config).to(device)
patch_model(model, cp_group=mesh["cp"], cp_sharding="zigzag" if args.packed else sharding)
if device == "cuda":
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
else:
    policy = MixedPrecisionPolicy()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)

# %% the loop
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
losses, warm, begin = [], max(1, args.steps // 10), 0.0
for step, (ids, limits) in enumerate(batches()):
    if step == warm:
        torch.accelerator.synchronize() if device == "cuda" else None
        begin = time.perf_counter()
    # One plan for all layers. With "balanced" every batch is cut in another way, which the plan knows.
    plan = plan_varlen_cp(limits, group=mesh["cp"], sharding=sharding)
    shares = {"group": mesh["cp"], "sharding": plan.sharding}
    # Positions restart in every document.
    index = torch.arange(length, device=device)
    starts = limits[torch.searchsorted(limits, index, right=True) - 1]
    loss = model(
        input_ids=cp_shard(ids, 1, **shares),
        position_ids=cp_shard((index - starts)[None], 1, **shares),
        labels=cp_shard(ids, 1, **shares),
        # Shifted while the sequence is whole: the token after a share's last one is another rank's.
        shift_labels=cp_shift_labels(ids, cu_seqlens=limits, **shares),
        num_items_in_batch=length - (len(limits) - 1),
        cp_plan=plan if args.packed else None,
    ).loss
    # The sum of the ranks' losses is the mean over all tokens. FSDP2 divides the sum of gradients by their number.
    (loss * size).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total)
losses = [float(loss) for loss in losses]
speed = (args.steps - warm) * length / (time.perf_counter() - begin)
peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
kind = "packed" if args.packed else "plain"


# %% what came of it
def plot(runs):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(3, 1), layout="constrained")
    for i, (number, run) in enumerate(sorted(runs.items())):
        left.plot(run["losses"], linewidth=2 + 3 * (len(runs) - 1 - i), label=f"{number} processes")
    left.set(xlabel="step", ylabel="loss, nats a byte", title=f"Llama, {layers} layers, {length} tokens, {kind}")
    left.legend()
    speeds = [run["tokens_per_second"] / 1e3 for _, run in sorted(runs.items())]
    right.bar_label(right.bar([str(number) for number in sorted(runs)], speeds), fmt="%.0f")
    right.set(title="1000 tokens/s", xlabel="processes", ylim=(0, 1.15 * max(speeds)))
    figure.savefig(args.out / f"train_long-{kind}.png", dpi=120)


if rank == 0:
    print(f"{size} processes, {kind}: {speed:.0f} tokens/s, {peak:.1f} GiB, losses {losses[0]:.4f} to {losses[-1]:.4f}")
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"losses": losses, "tokens_per_second": speed, "peak_gib": peak, "length": length}
    (args.out / f"train_long-{kind}-{size}.json").write_text(json.dumps(found))
    runs = {}
    for number in (1, 2, 3, 4, 8):
        path = args.out / f"train_long-{kind}-{number}.json"
        if path.exists() and (run := json.loads(path.read_text()))["length"] == length:
            runs[number] = run
    for number, run in runs.items():
        apart = max(abs(a - b) for a, b in zip(losses, run["losses"]))
        print(f"the losses of {number} processes are {apart:.1e} apart from these at most")
    try:
        plot(runs)
        print(f"wrote {args.out / f'train_long-{kind}.png'}")
    except ModuleNotFoundError as missing:
        print(f"no plot was written, since {missing.name} is not installed")
dist.barrier()  # leave together: the first one that closes its connections could abort the others
dist.destroy_process_group()
