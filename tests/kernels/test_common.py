"""The comparison of the kernels' tests: a gradient that is a sum does not pass when it is wrong."""

import pytest
import torch
from tests.kernels import common

SCALES = {"alpha": torch.tensor(1.5), "beta": torch.tensor(1.8)}


def wrong(change, monkeypatch):
    """The kernel's gradient of β goes through ``change``, which is given its terms as well."""
    run = common.run

    def changed(inputs, extra, options, impl):
        out, gradients = run(inputs, extra, options, impl)
        if impl == "triton":
            terms = (inputs[1] * gradients[1] / extra["beta"]).detach().flatten()
            gradients = (*gradients[:4], change(gradients[4], terms))
        return out, gradients

    monkeypatch.setattr(common, "run", changed)


@pytest.mark.parametrize(
    "change",
    [
        # One of 2,240 terms, as large as most.
        lambda found, terms: found - terms.abs().median(),
        lambda found, terms: found.bfloat16().float(),
        lambda found, terms: terms.bfloat16().float().sum(),
        lambda found, terms: terms.half().float().sum(),
        lambda found, terms: found * (1 + 1e-4),
    ],
    ids=["a term is missing", "bfloat16", "terms in bfloat16", "terms in float16", "a factor"],
)
def test_a_wrong_sum_is_found(change, monkeypatch):
    wrong(change, monkeypatch)
    with pytest.raises(AssertionError, match="gradient of beta errs by"):
        common.compare(extra=SCALES)


def test_its_own_terms_sum_to_the_gradient(monkeypatch):
    wrong(lambda found, terms: terms.sum(), monkeypatch)
    common.compare(extra=SCALES)
