"""`lln demo`: the page it leaves behind, whatever happens on the way."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lln import match_moments, reference
from lln.errors import InvalidInputError
from lln.files import write_atomically
from lln_lab.demo import corpus as corpus_module
from lln_lab.demo import run_demo
from lln_lab.demo import trainees as training
from lln_lab.demo.byte_encoder import ByteEncoder, EncoderSize, trained_attentions
from lln_lab.demo.concentration import KERNELS, Concentration, concentration, factors
from lln_lab.demo.corpus import FEWEST_BYTES, load_corpus
from lln_lab.demo.demo_charts import speed_chart
from lln_lab.demo.headlines import speed_headline
from lln_lab.demo.page import Demo, render_json, render_page
from lln_lab.demo.speed import Speed
from lln_lab.demo.state import Clock
from lln_lab.demo.trainees import TRAINED, Training
from lln_lab.report.chart import inline_svg
from lln_lab.threads import faster_threads

VOID = {"meta", "img", "br", "link", "input", "hr"}


class PageReader(HTMLParser):
    """Fails on tags that do not pair up; collects ids, text and everything a browser would load."""

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.loads, self.tags, self.words = [], [], [], set(), []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._note(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def _note(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.loads.append(value)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read_page(path):
    page = path.read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    reader = PageReader(page)
    assert {"method", "concentration", "speed", "training", "use", "environment"} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    # A name inside the page is nothing to load.
    inside = {f"#{ident}" for ident in reader.ids}
    loads = set(reader.loads) - inside
    assert all(load.startswith("data:image/png;base64,") for load in loads)
    assert not reader.tags & {"script", "link", "iframe", "object"}
    assert not re.search(r"https?://|url\(|@import", page)
    assert list(path.parent.glob(".*")) == [], "a temporary file was left behind"
    return page, reader


def read_json(page):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(page.with_suffix(".json").read_text("utf-8"), parse_constant=refuse)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small steps on machines that run other tests beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "words.txt"
    lines = (f"line {n} says {n * n % 97} twice: {n * n % 97}.\n" for n in range(3000))
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    lines = []
    page = run_demo(
        out=tmp_path_factory.mktemp("demo"),
        data=None,
        seconds=4.0,
        quick=True,
        open_browser=False,
        echo=lines.append,
    )
    return page, lines


def test_quick_run_leaves_a_whole_page(quick_run):
    page, lines = quick_run
    html, reader = read_page(page)
    assert html.count('<span class="state">complete</span>') == 3
    assert "Not complete" not in reader.text
    assert 'http-equiv="refresh"' not in html
    assert html.count('class="chart"') == 4
    assert html.count('class="matrix"') == 4
    assert "not evidence" in reader.text
    assert "from lln import lln_diag_attention" in reader.text
    assert "nan" not in re.findall(r"[a-z]+", reader.text.lower())
    assert lines[-1] == f"The page: {page}"


def test_quick_run_leaves_its_numbers(quick_run):
    page, _ = quick_run
    numbers = read_json(page)
    assert numbers["complete"] is True
    assert numbers["environment"]["PyTorch"] == torch.__version__
    assert set(numbers["concentration"]["entropy_bits"]) == set(KERNELS)
    assert numbers["speed"]["milliseconds"]["softmax"]["128"] > 0
    curves = numbers["training"]["held_out_loss"]
    assert {len(curve) for curve in curves.values()} == {len(numbers["training"]["steps"])}
    assert all(math.isfinite(loss) for curve in curves.values() for loss in curve)
    # Matrices are pictures on the page; as numbers they would be megabytes.
    assert len(json.dumps(numbers)) < 20_000
    assert page.stat().st_size < 300_000


def test_page_names_no_folder_of_this_machine(quick_run):
    page, _ = quick_run
    for text in (page.read_text("utf-8"), page.with_suffix(".json").read_text("utf-8")):
        assert str(page.parent) not in text
        assert "site-packages" not in text
        assert "/lib/python" not in text


def test_interrupt_in_training_leaves_a_partial_page(tmp_path, monkeypatch, text_file):
    learn, calls = training._Trainee.learn, []

    def interrupted(self, batch, rate):
        # Steps at rate 0 only measure time.
        calls.extend([rate] if rate else [])
        # In the middle of the second turn: two attentions are ahead of the others.
        if len(calls) == 4 * 3 + 7:
            raise KeyboardInterrupt
        return learn(self, batch, rate)

    monkeypatch.setattr(training._Trainee, "learn", interrupted)
    lines = []
    page = tmp_path / "mine.html"
    with pytest.raises(KeyboardInterrupt):
        run_demo(page, text_file, 2.0, True, False, lines.append)
    html, reader = read_page(page)
    assert "The run was interrupted. Not complete: training." in reader.text
    assert html.count('<span class="state">complete</span>') == 2
    assert html.count('<span class="state">stopped early</span>') == 1
    assert 'http-equiv="refresh"' not in html
    assert str(page) in lines[-1]
    numbers = read_json(page)
    assert numbers["complete"] is False
    curves = numbers["training"]["held_out_loss"]
    assert {len(curve) for curve in curves.values()} == {len(numbers["training"]["steps"])}


def test_interrupt_at_the_start_leaves_a_page_that_says_so(tmp_path, monkeypatch, text_file):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lln_lab.demo.concentration.concentration", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, text_file, 2.0, True, False, lambda _: None)
    html, reader = read_page(tmp_path / "lln-demo.html")
    assert "Not complete: concentration, speed, training." in reader.text
    assert html.count("The run was stopped before this part had a result.") == 3


def test_page_is_readable_before_anything_is_measured(tmp_path):
    path = tmp_path / "page.html"
    write_atomically(path, render_page(Demo()))
    write_atomically(path.with_suffix(".json"), render_json(Demo()))
    html, reader = read_page(path)
    assert "The run is still going on." in reader.text
    assert 'http-equiv="refresh"' in html
    assert read_json(path)["training"]["unigram_loss"] is None


@pytest.mark.parametrize("content", [None, b"", b"short", b"\0" * 2 * FEWEST_BYTES])
@pytest.mark.parametrize("folder", [False, True])
def test_bad_data_gets_a_sentence_before_any_work(tmp_path, content, folder):
    data = tmp_path / "data"
    if folder and content is not None:
        data.mkdir()
        (data / "file.txt").write_bytes(content)
    elif content is not None:
        data.write_bytes(content)
    with pytest.raises(InvalidInputError) as error:
        run_demo(tmp_path / "out", data, 1.0, True, False, lambda _: None)
    message = str(error.value)
    assert "--data" in message
    assert message.endswith(".")
    assert "\n" not in message
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_bad_seconds_get_a_sentence(tmp_path, seconds):
    with pytest.raises(InvalidInputError, match="--seconds must be a positive number"):
        run_demo(tmp_path, None, seconds, True, False, lambda _: None)


def test_out_that_cannot_be_a_folder_gets_a_sentence(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(InvalidInputError, match="--out"):
        run_demo(tmp_path / "taken", None, 1.0, True, False, lambda _: None)


def test_page_survives_a_failed_write(tmp_path):
    path = tmp_path / "page.html"
    write_atomically(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]


def test_standard_library_is_split_by_file():
    found = load_corpus()
    assert len(found.train) > 10 * FEWEST_BYTES
    assert 0.02 < len(found.held_out) / len(found.train) < 0.4
    assert re.fullmatch(r"every tenth of [\d,]+ files", found.split)
    again = load_corpus()
    assert torch.equal(found.train, again.train)


def test_folder_is_read_in_order_without_hidden_or_binary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "FEWEST_BYTES", 10)
    for index in range(20):
        (tmp_path / f"{index:02}.txt").write_text(f"{index:02}" * 50)
    (tmp_path / "05.bin").write_bytes(b"\0binary")
    (tmp_path / ".hidden").write_text("secret")
    found = load_corpus(tmp_path)
    assert bytes(found.held_out.tolist()) == b"09" * 50 + b"19" * 50
    assert b"secret" not in bytes(found.train.tolist())
    assert len(found.train) == 18 * 100


def test_one_file_is_split_at_its_end(text_file):
    found = load_corpus(text_file)
    whole = text_file.read_bytes()
    assert bytes(found.train.tolist()) + bytes(found.held_out.tolist()) == whole
    assert len(found.held_out) == len(whole) // 10


@pytest.mark.parametrize("name", ["lln", "lln_entropy", "lln_unit"])
def test_factors_are_the_paper_s_matrix(name):
    query, key = torch.randn(2, 1, 1, 24, 8, dtype=torch.float64)
    alpha, beta = 1.0, 1.0
    if name != "lln_unit":
        criterion = "variance" if name == "lln" else "entropy"
        alpha, beta = match_moments(query, key, criterion=criterion)
    expected = reference.lln_matrix(query, key, alpha, beta)
    left, right = factors(name, query, key)
    torch.testing.assert_close(left @ right, expected)
    _, gap, _ = concentration(name, query, key)
    assert gap == pytest.approx(reference.spectral_gap(expected).item(), abs=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_gives_rows_that_sum_to_one(name):
    query, key = torch.randn(2, 1, 1, 24, 8, dtype=torch.float64)
    entropy, gap, matrix = concentration(name, query, key)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 1, 24, dtype=torch.float64))
    assert 0 < entropy <= math.log2(24)
    assert 0 <= gap <= 1


def test_matching_the_entropy_comes_closer_to_softmax_than_the_variance():
    part = Concentration(tokens=128, score_variances=(1.0, 4.0), seeds=2)
    assert list(part.measure(Clock(60.0)))[-1] == 1.0
    entropy = {name: part.distance(part.entropy, name) for name in KERNELS}
    assert entropy["lln_entropy"] < 0.2 < entropy["lln"] < entropy["elu"]


def test_a_crossover_within_noise_is_said_and_not_drawn():
    part = Speed(lengths=(128, 256, 512))
    part.runs = {
        "softmax": {128: [1.0, 1.1, 1.2], 256: [3.0, 4.0, 5.0], 512: [16.0, 16.0, 16.0]},
        "lln": {128: [2.0, 2.1, 2.2], 256: [2.9, 3.5, 4.6], 512: [4.0, 4.0, 4.0]},
        "lln_diag": {128: [2.0, 2.1, 2.2], 256: [2.0, 2.1, 2.2], 512: [4.0, 4.0, 4.0]},
    }
    headline = speed_headline(part).replace("\xa0", " ")
    assert "LLN is faster than softmax from N = 512, 4 times as fast" in headline
    assert "where that begins is within noise at N = 256." in headline
    assert "LLN + Diag is faster than softmax from N ≈ 180" in headline
    assert re.findall(r">([^<]*: N ≈ [^<]*)<", inline_svg(speed_chart(part))) == [
        "LLN + Diag: N ≈ 180"
    ]
    page = render_page(Demo(speed=part))
    # Quartiles of softmax and LLN at 256 tokens are a quarter of the median apart, or more.
    assert page.count("<td>~") == 2
    assert "~: noisy" in page
    found = part.as_json()
    assert found["crossover"]["lln"] is None
    assert found["verdict"]["lln"] == "faster from N = 512, within noise at N = 256"
    assert found["crossover"]["lln_diag"] == pytest.approx(182, abs=1)
    part.runs["lln"][512] = [10.0, 15.0, 30.0]
    headline = speed_headline(part).replace("\xa0", " ")
    assert "Whether LLN is faster than softmax at N = 512 is within noise (1.1 times" in headline


def test_headline_admits_when_nothing_is_faster():
    part = Speed(lengths=(128, 256))
    part.runs = {
        "softmax": {128: [1.0], 256: [2.0]},
        "lln": {128: [4.0], 256: [5.0]},
        "lln_diag": {128: [0.5], 256: [0.5]},
    }
    headline = speed_headline(part)
    assert "LLN was not faster up to N = 256 (0.4 times" in headline.replace("\xa0", " ")
    assert "LLN + Diag was faster at every length measured, 4 times" in headline


def test_page_says_when_times_cannot_be_trusted():
    part = Speed(lengths=(128, 256, 512))
    part.runs = {
        "softmax": {128: [1.0], 256: [2.0, 4.0], 512: [8.0]},
        "lln": {128: [1.0], 256: [2.0], 512: [3.0]},
        "lln_diag": {128: [1.0], 256: [5.0], 512: [2.0]},
    }
    assert part.unsteady("softmax") == part.unsteady("lln") == []
    assert part.unsteady("lln_diag") == [512]
    reader = PageReader(render_page(Demo(speed=part)))
    assert "Less time than at a shorter length: LLN + Diag at N = 512." in reader.text
    part.runs["lln_diag"][512] = [6.0]
    assert "Less time" not in PageReader(render_page(Demo(speed=part))).text


def test_speed_drops_what_would_take_too_long():
    part = Speed(lengths=(32, 64, 128), heads=1, width=8)
    list(part.measure(Clock(0.0)))
    assert part.measured() == [32]
    assert set(part.dropped) == {"softmax", "lln", "lln_diag"}


def test_threads_are_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with faster_threads() as chosen:
            assert chosen in (1, 2)
            assert torch.get_num_threads() == chosen
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_encoders_start_equal_and_learn(text_file):
    part = Training(size=EncoderSize(length=64, width=32, heads=2, layers=1))
    batch = part._sample(load_corpus(text_file).train, torch.Generator().manual_seed(0))
    attentions = trained_attentions(part.size.block_size)
    trainees = [training._Trainee(part, attentions[name], torch.zeros(256)) for name in TRAINED]
    start = trainees[0].encoder.state_dict()
    for trainee in trainees:
        assert all(
            torch.equal(start[key], weight) for key, weight in trainee.encoder.state_dict().items()
        )
    for trainee in trainees:
        assert trainee.sit(batch) == pytest.approx(math.log(256), rel=1e-5)
        for _ in range(15):
            trainee.learn(batch, 6e-3)
        assert trainee.sit(batch) < math.log(256) - 1


class _NoSquares(TorchDispatchMode):
    """Fails when any operation makes a matrix of tokens by tokens."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                assert list(tensor.shape).count(self.tokens) < 2, f"{func} made {tensor.shape}"
        return result


@pytest.mark.parametrize("name", ["lln", "diag", "lln_diag"])
def test_linear_encoders_never_hold_tokens_by_tokens(name):
    size = EncoderSize(length=97, width=16, heads=2, layers=1)
    encoder = ByteEncoder(size, trained_attentions(size.block_size)[name], torch.zeros(256))
    tokens = torch.randint(256, (3, 97))
    with _NoSquares(97):
        encoder(tokens, torch.ones(3, 97, dtype=torch.bool)).sum().backward()
