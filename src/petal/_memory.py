"""The memory that a process keeps for itself."""

import ctypes


def keep_freed_memory() -> bool:
    """Let this process keep memory that it has freed, for its next batch; whether that could be arranged.

    On a CPU the feature maps of a batch are allocated and freed with every layer. glibc hands blocks of that size back to
    the system at once, which has to clear them page by page when they are asked for again: a fourth of a step. It is a
    choice for a whole process, so the commands make it for theirs, and whoever calls `accelerate` in their own may.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    largest, rest = -3, -1  # M_MMAP_THRESHOLD, above which a block is mapped alone; M_TRIM_THRESHOLD, kept at the end
    return bool(mallopt(largest, 1 << 30)) and bool(mallopt(rest, (1 << 31) - 1))
