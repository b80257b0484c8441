"""What the doctor says where something fails."""

import pytest

from lln.testing import doctor


@pytest.mark.parametrize("where", ["why_not", "lln_diag_attention"])
def test_doctor_tells_of_a_failing_triton_in_one_line(monkeypatch, where):
    class CompilationError(Exception):
        pass

    own = getattr(doctor.ways if where == "why_not" else doctor, where)

    def fail(*given, impl):
        if impl != "triton":
            return own(*given, impl=impl)
        try:
            raise AssertionError("no room for a tile\nmore")
        except AssertionError as error:
            raise CompilationError("at 12:8:\ndef kernel(\n   ^") from error

    monkeypatch.setattr(doctor.ways, "why_not", lambda call, impl: None)
    monkeypatch.setattr(doctor.ways, "implementations", lambda kind: ("triton", "eager"))
    if where == "why_not":
        monkeypatch.setattr(doctor.ways, where, lambda call, impl: fail(call, impl=impl))
    else:
        monkeypatch.setattr(doctor, where, fail)
    lines = []
    assert not doctor.examine(lines.append)
    assert lines[-3].startswith("cpu          right")
    assert lines[-4] == "cpu          FAILED: CompilationError: no room for a tile, impl 'triton'"
