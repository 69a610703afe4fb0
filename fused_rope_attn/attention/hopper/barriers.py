"""How the warps of an sm_90 kernel meet: rings of buffers in shared memory, and named barriers.

A ring is what Triton's Gluon tutorial on attention calls a channel, and CUTLASS a pipeline: a producer fills its slots
in a cycle, consumers empty them, and two mbarriers for each slot say when it is full and when it is empty. Named
barriers are the hardware's sixteen ``bar`` counters, which need no memory.
"""

from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import async_copy, gl, jit, mbarrier


@jit
def allocate_barriers(COUNT: gl.constexpr):
    """Room for COUNT mbarriers, (COUNT, 1), not yet initialised."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@jit
def arrive_by_threads(barrier):
    """Every thread arrives at an mbarrier for itself, as soon as its asynchronous copies are complete: it has none.

    Triton makes the warps of a partition wait for one another before a single arrival for all of them. They need not,
    where what they have done was to wait for products of tensor cores. It orders no stores of the threads themselves.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@record
class Ring:
    """STAGES slots of shared memory, which a producer fills and consumers empty in a cycle.

    ``smem`` (STAGES, ...) holds the slots; ``full`` and ``empty`` (STAGES, 1) are mbarriers. Both sides count *steps*:
    how many slots they have filled or emptied since the kernel began. Step s uses slot ``s % STAGES``; what an mbarrier
    can tell apart is how often the whole ring has been used before, modulo 2. A producer waits until the slot is empty,
    fills it and arrives at ``full``, or lets the TMA do so; a consumer waits until it is full, and releases it.
    """

    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @jit
    def init_slot(self, slot, FILLS: gl.constexpr, RELEASES: gl.constexpr):
        """Initialise the barriers of one slot: how many arrivals fill it, and how many release it: one of each
        warpgroup by ``release``, of each thread by ``release_operands``."""
        mbarrier.init(self.full.index(slot), count=FILLS)
        mbarrier.init(self.empty.index(slot), count=RELEASES)

    @jit
    def slot(self, step):
        """The slot that a step uses."""
        return step % self.STAGES

    @jit
    def wait_full(self, step, pred=True):
        """Consumers: wait until the slot has been filled for this step."""
        mbarrier.wait(self.full.index(self.slot(step)), (step // self.STAGES) & 1, pred=pred)

    @jit
    def release(self, step, pred=True):
        """Consumers: give the slot back once nothing reads it any more."""
        mbarrier.arrive(self.empty.index(self.slot(step)), pred=pred)

    @jit
    def release_operands(self, step, pred=True):
        """As ``release``, by every thread for itself: RELEASES counts threads.

        For a slot whose readers were tensor cores that have been waited for, or loads that stand before this. For the
        latter it relies on sm_90 to perform a warp's accesses to shared memory in their order, which PTX does not say.
        """
        if pred:
            arrive_by_threads(self.empty.index(self.slot(step)))

    @jit
    def wait_empty(self, step):
        """Producers: wait until the slot's last content has been given back; nothing precedes the first round."""
        phase = ((step // self.STAGES) & 1) ^ 1
        mbarrier.wait(self.empty.index(self.slot(step)), phase)


@jit
def wait_at_named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at the hardware's barrier of this number, and wait until THREADS threads have arrived."""
    gl.inline_asm_elementwise(
        f"bar.sync {BARRIER}, {THREADS}; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit
def arrive_at_named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at the hardware's barrier of this number without waiting: another warp waits there."""
    gl.inline_asm_elementwise(
        f"bar.arrive {BARRIER}, {THREADS}; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
