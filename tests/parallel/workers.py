"""Four processes that wait for work: started once, they run every case of these tests.

Groups of the first 2, 3 or 4 of them serve the cases; "odd" has the ranks 1 and 3, in which a
process has another number than in the world.
"""

import io
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = 4
GROUPS = {2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 2, 3], "odd": [1, 3]}
SECONDS = 60


class Pool:
    """The processes, seen from the tests."""

    def __init__(self, size=SIZE):
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        place = str(Path(self.folder.name) / "meeting")
        self.tasks = [context.SimpleQueue() for _ in range(size)]
        self.results = [context.Queue() for _ in range(size)]
        self.processes = [
            context.Process(target=_serve, args=(rank, size, place, task, result), daemon=True)
            for rank, (task, result) in enumerate(zip(self.tasks, self.results, strict=True))
        ]
        for process in self.processes:
            process.start()

    def run(self, function, group, *arguments):
        """What ``function(process_group, place in it, *arguments)`` returns on every member."""
        members = GROUPS[group]
        for rank in members:
            self.tasks[rank].put((function, group, arguments))
        answers = [self.results[rank].get(timeout=2 * SECONDS) for rank in members]
        for place, (failure, _) in enumerate(answers):
            assert failure is None, f"member {place} of group {group}:\n{failure}"
        return [torch.load(io.BytesIO(found), weights_only=False) for _, found in answers]

    def close(self):
        for task in self.tasks:
            task.put(None)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


def _serve(rank, size, place, tasks, results):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )
    groups = {name: dist.new_group(members) for name, members in GROUPS.items()}
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
