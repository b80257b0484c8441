"""Cells in a process of their own: what a cell does to it, and what is left for the next one."""

import os
import threading

import pytest

from lln_lab.bench import peers_bench
from lln_lab.bench.command import Options
from lln_lab.bench.peers_bench import run_peers
from lln_lab.bench.peers_cells import ALONE, LayerSize, PeerCell, measure_cell
from lln_lab.bench.peers_worker import Worker, _serve


def cell(system, tokens=8):
    return PeerCell(ALONE, system, "forward", 1, tokens)


def misbehave(cell, greeting):
    """What the other process runs: a cell's system says what happens."""
    if cell.system == "dies":
        os._exit(7)
    if cell.system == "hangs":
        threading.Event().wait()
    if cell.system == "fails":
        return {"name": cell.name, "status": "failed", "reason": "wrong"}
    return {"name": cell.name, "status": "timed", "greeting": greeting, "process": os.getpid()}


@pytest.mark.slow
def test_a_lost_process_costs_its_cell_and_nothing_else():
    with Worker(misbehave, ("hello",)) as worker:
        first = worker(cell("fine"))
        assert first["greeting"] == "hello"
        assert first["process"] != os.getpid()
        assert worker(cell("fails"))["reason"] == "wrong"
        assert worker(cell("fine"))["process"] == first["process"]
        died = worker(cell("dies"))
        assert (died["status"], died["fatal"]) == ("failed", True)
        assert died["reason"] == "the process ended with 7"
        assert (died["system"], died["tokens"]) == ("dies", 8)
        second = worker(cell("fine"))
        assert second["process"] != first["process"]
        # Only of a process that never answers: on a busy machine the others may take their time.
        worker.patience = 0.5
        hung = worker(cell("hangs"))
        assert (hung["fatal"], hung["reason"]) == (True, "no answer after 0.5 s")
    for gone in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(gone["process"], 0)


def test_a_lost_gpu_is_told(monkeypatch):
    class Pipe:
        def __init__(self, *cells):
            self.cells, self.sent = list(cells), []

        def recv(self):
            if not self.cells:
                raise EOFError
            return self.cells.pop(0)

        def send(self, answer):
            self.sent.append(answer)

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lost)
    pipe = Pipe(cell("fine"), cell("fails"))
    _serve(pipe, misbehave, ("",), 1)  # pyright: ignore
    assert pipe.sent[0] is None
    assert [is_usable for _, is_usable in pipe.sent[1:]] == [True, False]


@pytest.mark.slow
def test_the_command_runs_its_cells_there(tmp_path, monkeypatch):
    # As on a GPU, but for the device.
    def isolated(device, arguments):
        return Worker(measure_cell, arguments)

    monkeypatch.setattr(peers_bench, "_measurer", isolated)
    monkeypatch.setitem(peers_bench.SIZES, "cpu", LayerSize(32, 2, "bfloat16"))
    lines = []
    out = tmp_path / "out.json"
    options = Options(lines.append, "cpu", lengths=[16, 32], out=out, seconds=1e-3)
    assert run_peers(options, systems=["softmax", "elu"], tokens=64)
    assert (tmp_path / "out.json").read_text().count('"status": "timed"') == 16
