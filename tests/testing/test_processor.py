"""What is said of the processor, by the tests and by lln doctor."""

import platform

import conftest
import pytest
import torch

from lln.testing import doctor, processor

MKL = """PyTorch built with:
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605
  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71049)
  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release, LAPACK_INFO=mkl, USE_MKL=ON
"""
OPEN = "  - Build settings: BLAS_INFO=open, BUILD_TYPE=Release, LAPACK_INFO=open"


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        (MKL, "BLAS mkl, LAPACK mkl, oneMKL 2024.2, oneDNN 3.12.0"),
        (OPEN, "BLAS open, LAPACK open"),
        ("", "unknown"),
    ],
    ids=["MKL", "OpenBLAS", "nothing"],
)
def test_math_libraries_by_name_and_version(configuration, said):
    assert processor.math_libraries(configuration) == said


def test_processors_without_a_name(monkeypatch):
    monkeypatch.setattr(processor, "output_of", lambda *_: "Model name:   -")
    assert processor.processor() == f"{platform.machine()} CPU"
    monkeypatch.setattr(processor, "output_of", lambda *_: "Model name:   Neoverse-N1\nCPU(s): 2")
    assert processor.processor() == "Neoverse-N1"


def test_a_program_that_is_missing_prints_nothing():
    assert processor.output_of("no-such-program-of-any-system") == ""


def test_the_tests_and_the_doctor_say_the_same():
    found = processor.facts()
    assert processor.processor() in found["processor"]
    assert platform.machine() in found["processor"]
    assert torch.backends.cpu.get_cpu_capability() in found["processor"]
    assert torch.__version__ in found["torch"]
    lines = []
    doctor.examine(lines.append)
    header = conftest.pytest_report_header()
    for name, fact in found.items():
        assert f"{name:<12} {fact}" in lines
        assert f"{name}: {fact}" in header
