"""How much memory a batch takes, and how many rows fit."""

import ctypes
import math
import os
from bisect import bisect_right
from pathlib import Path

import torch

from engine.decoding.lanes import lanes_for
from engine.errors import ScheduleError
from engine.forward.cache import rows_held, slots_for
from engine.forward.prompt_pass import PROMPT_TOKENS
from engine.schedules.schedule import Schedule
from engine.shape import ModelShape

# Rows beyond which a batch gains little: a core's arithmetic is full with a few dozen rows, a GPU's with a few hundred.
CORE_ROWS, GPU_ROWS = 64, 512
CGROUP = Path("/sys/fs/cgroup")  # of this process, as a container sees it
LEAST_ANSWERS = 20  # that calibration and training can make something of
SHARE = 0.8  # of the free memory: allocators round up, and others use memory too
# glibc's mallopt(3): sizes from which memory comes from the system at once, that is kept free before it goes back,
# and how many heaps threads spread over. A heap of a thread's own goes back to the system whenever it is empty.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
LOGIT_COPIES = 4  # float32 [B, vocab]: as computed, adjusted, sorted, and as probabilities


def batch_bytes(
    shape: ModelShape,
    schedule: Schedule,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    element_bytes: int,
    lanes: int = 1,
) -> int:
    """Most memory that a batch takes beside the weights: its longest prompt has `prompt_tokens`, a row generates up to
    `new_tokens`. `element_bytes` are 4 in float32, 2 in half precision; each of the lanes may run such a prompt.
    """
    prompt_pass = max(PROMPT_TOKENS, lanes * prompt_tokens) * token_elements(shape) * element_bytes
    logits = LOGIT_COPIES * rows * shape.vocab * 4
    if (preview := schedule.head_preview) is not None:
        logits += rows * preview.candidates * preview.width * element_bytes
    cache = lanes * cache_peak(shape, -(-rows // lanes), prompt_tokens, new_tokens, element_bytes)
    return cache + prompt_pass + logits


def token_elements(shape: ModelShape) -> int:
    """Numbers that a token takes in a pass, keys, values and logits aside."""
    mlp_width = shape.mlp_parameters // shape.hidden  # three times the inner width where there is a gate
    return 8 * shape.hidden + 2 * shape.query_width + mlp_width


def cache_peak(shape: ModelShape, rows: int, prompt_tokens: int, new_tokens: int, element_bytes: int) -> int:
    """Bytes of the key/value cache of rows that enter together: each has room in all layers, and to its end."""
    row_bytes = shape.cache_elements(slots_for(prompt_tokens + new_tokens)) * element_bytes  # in a layer
    return shape.layers * rows_held(rows, row_bytes) * row_bytes


def rows_that_fit(
    free_bytes: int,
    device: str,
    shape: ModelShape,
    schedule: Schedule,
    prompt_tokens: int,
    new_tokens: int,
    element_bytes: int,
    most: int | None = None,
    caches: int = 1,
) -> int:
    """Largest batch size, at least 1, whose `batch_bytes` are within SHARE of `free_bytes` of a "cpu" or "cuda".

    Args:
        most: rows; default those beyond which a batch gains little.
        caches: that each row has a place in at a time.
    """

    def needed(rows: int) -> int:
        lanes = lanes_for(torch.device(device), rows, 1)
        others = (caches - 1) * cache_peak(shape, rows, prompt_tokens, new_tokens, element_bytes)
        return others + batch_bytes(shape, schedule, rows, prompt_tokens, new_tokens, element_bytes, lanes)

    cores = max(1, int(min(torch.get_num_threads(), _container_cores())))
    gaining = min(CORE_ROWS * cores, GPU_ROWS) if device == "cpu" else GPU_ROWS
    sizes = range(1, (most or gaining) + 1)
    return max(1, bisect_right(sizes, SHARE * free_bytes, key=needed))


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still take on a device; of a machine's memory its share of the cores, as others
    may run beside it.
    """
    if device.type == "cuda":
        reserved, (free, whole) = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)
        # By number, which that function alone wants; None is the current device.
        ours = int(torch.cuda.get_per_process_memory_fraction(device.index) * whole) - reserved
        return min(free, ours) + reserved - torch.cuda.memory_allocated(device)
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    machine = min(1.0, threads / cores) * _available()
    container = min(1.0, threads / min(cores, _container_cores())) * _container_rest()
    return int(min(machine, container)) + _kept_bytes()


def check_memory(
    task: str, kept: int, working: int, free: int, prompts: int, model: int = 0, kept_of: int | None = None
) -> None:
    """Raises ScheduleError if a task on answers to so many prompts takes more memory than can be counted on; bytes.

    Args:
        task: in words.
        kept: of the answers, as long as it takes.
        working: that it takes besides, and that fewer prompts hardly make less.
        free: there is.
        model: of a model that is yet to be loaded.
        kept_of: prompts that what is kept grows with, where more of them take no more.
    """
    room = int(SHARE * free) - model - working
    if kept > room:
        fits = int((kept_of or prompts) * room / kept)
        way_out = f"with about {fits} prompts it fits"
        if fits < LEAST_ANSWERS:
            way_out = f"fewer than the {LEAST_ANSWERS} prompts that it needs would fit"
            if room + working <= 0:
                way_out = "the model alone is too large"
            elif room <= 0:
                way_out = "what it works in alone does not fit"
            way_out += ", so it takes a machine with more memory, or shorter or far fewer prompts"
        beside = f" beside the model's {model / 1e9:.1f} GB" if model else ""
        raise ScheduleError(
            f"{task} on {prompts} prompts keeps some {kept / 1e9:.1f} GB of full depth in memory{beside} and takes "
            f"{working / 1e9:.1f} GB to work in, and {free / 1e9:.1f} GB are free: {way_out}"
        )


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees for its next pass, where that library is glibc.

    Else the results of every large product come from the system and go back to it, and a tenth of a pass goes by
    while it clears their pages. From now on the process keeps the most that it has needed.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        # Older ones refuse more than 32 MiB, and no longer raise a threshold by themselves once another has been set.
        if not library.mallopt(_MMAP_THRESHOLD, 1 << 30):
            library.mallopt(_MMAP_THRESHOLD, 1 << 25)
        for parameter, value in ((_TRIM_THRESHOLD, (1 << 31) - 1), (_ARENA_MAX, 1)):
            library.mallopt(parameter, value)


def release_freed_memory() -> None:
    """Give back to the system what `keep_freed_memory` has the C library keep.

    Where sizes differ from one pass to the next, little of what was freed is as large as what is wanted next, and in
    some fifty steps of a training what is kept grows to more than twice what is in use.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`, of ten numbers; the last three are the bytes that are in use, free, and free at the
    top.
    """

    _fields_ = [
        ("others", ctypes.c_size_t * 7),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def _kept_bytes() -> int:
    """What this process has freed and the C library keeps for it, where it tells: glibc from 2.33 on."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Heap
    heap = library.mallinfo2()
    # Of what is free some may be the system's again, which the library counts nevertheless.
    return min(int(heap.fordblks), max(0, _resident() - int(heap.uordblks)))


def _resident() -> int:
    """What this process has in memory that is no file's; more than there can be where the system does not say."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 1 << 62)


def _available() -> int:
    """What the machine has left, file cache included; half of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _container_rest() -> int:
    """What a container's limit leaves, file cache included: control groups, version 2."""
    try:
        limit, used = (CGROUP / "memory.max").read_text().strip(), int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    cached = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return max(0, int(limit) - used + cached) if limit.isdecimal() else 1 << 62


def _container_cores() -> float:
    """How many a container may use."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except OSError:
        return math.inf
    return max(1.0, int(quota) / int(period)) if quota.isdecimal() else math.inf
