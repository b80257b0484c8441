"""Peak memory by counting what is allocated: the same at every load and under every allocator."""

import tracemalloc

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call):
    """Bytes that a call holds at its peak beyond those before it.

    Tensors, the temporaries inside operators and in the backward pass included, and numpy's arrays,
    each at their own peak. Resident memory would follow what the C library gives back and when.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tracemalloc.start()
        try:
            call()
            _, arrays = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    totals, events = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            found = event.extra_fields
            totals.append((event.start_time_ns, found.total_allocated, found.alloc_size))
    if not totals:
        return arrays
    _, first, size = min(totals)
    return max(total for _, total, _ in totals) - (first - size) + arrays
