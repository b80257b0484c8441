"""Every kernel that is interpreted here is interpreted quickly."""

from tests.kernels.quick_interpreter import quicken

quicken()
