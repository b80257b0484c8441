"""Four processes that wait for work: started once, they run every case of these tests.

Groups of the first 2, 3 or 4 of them serve the cases; "odd" has the ranks 1 and 3, in which a
process has another number than in the world. They are forked off a server that has loaded what
they need, so that it is loaded once.
"""

import io
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from queue import Empty

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.kernels.quick_interpreter import quicken

SIZE = 4
# With the compiler, which one test file needs, and transformers, which another one needs.
LOADED = ("tests.parallel.splits", "torch._inductor.compile_fx", "transformers")
GROUPS = {2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 2, 3], "odd": [1, 3]}
# Long, because a busy machine may let a process wait: only what goes wrong takes so much.
SECONDS = 60
DEAD = "its process has ended"


def server():
    """Where processes are forked off that have loaded `LOADED`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    return context


class Pool:
    """The processes, seen from the tests; started again after a case that left them waiting."""

    def __init__(self):
        self.processes = []

    def run(self, function, group, *arguments, may_die=False, patience=4 * SECONDS):
        """What ``function(process_group, place in it, *arguments)`` returns on every member.

        With ``may_die`` members may end their processes: they answer None. ``patience`` is in
        seconds.
        """
        if not self.processes:
            self._start()
        members = GROUPS[group]
        for rank in members:
            self.tasks[rank].put((function, group, arguments))
        answers = [self._answer(rank, patience) for rank in members]
        failures = [failure for failure, _ in answers if failure is not None]
        dead = [found is None for _, found in answers]
        if failures or any(dead):
            self.close()
        if may_die:
            failures = [failure for failure in failures if failure != DEAD]
        assert not failures, "\n".join(failures)
        return [
            None if gone else torch.load(io.BytesIO(found), weights_only=False)
            for gone, (_, found) in zip(dead, answers, strict=True)
        ]

    def _start(self):
        context = server()
        self.folder = tempfile.TemporaryDirectory()
        place = str(Path(self.folder.name) / "meeting")
        self.tasks = [context.SimpleQueue() for _ in range(SIZE)]
        self.results = [context.Queue() for _ in range(SIZE)]
        self.processes = [
            context.Process(target=_serve, args=(rank, place, task, result), daemon=True)
            for rank, (task, result) in enumerate(zip(self.tasks, self.results, strict=True))
        ]
        for process in self.processes:
            process.start()

    def _answer(self, rank, patience):
        for _ in range(patience):
            try:
                return self.results[rank].get(timeout=1)
            except Empty:
                if not self.processes[rank].is_alive():
                    return DEAD, None
        return f"rank {rank} did not answer", None

    def close(self):
        for task in self.tasks if self.processes else ():
            task.put(None)
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        if self.processes:
            self.folder.cleanup()
        self.processes = []


def _serve(rank, place, tasks, results):
    torch.set_num_threads(1)
    quicken()
    patience = timedelta(seconds=SECONDS)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=SIZE,
        timeout=patience,
    )
    groups = {name: dist.new_group(members, timeout=patience) for name, members in GROUPS.items()}
    while (task := tasks.get()) is not None:
        function, name, arguments = task
        try:
            found = function(groups[name], GROUPS[name].index(rank), *arguments)
            failure = None
        except Exception:
            found, failure = None, traceback.format_exc()
        buffer = io.BytesIO()
        torch.save(found, buffer)
        results.put((failure, buffer.getvalue()))
    dist.destroy_process_group()
