"""Tiny random Hugging Face models; without transformers these tests do not run.

`make test-oldest` sets ``LLN_TEST_OLDEST``: then they run with the oldest promised version or fail.
"""

import os
from pathlib import Path

import pytest
import torch

from lln.integrations import OLDEST_TRANSFORMERS

if os.environ.get("LLN_TEST_OLDEST"):
    # Not importorskip: an installation that does not work would skip every test, and pass.
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) != OLDEST_TRANSFORMERS:
        raise pytest.UsageError(
            f"transformers {transformers.__version__} is not the oldest promised, "
            f"{'.'.join(map(str, OLDEST_TRANSFORMERS))}; see requirements-oldest.txt."
        )
else:
    transformers = pytest.importorskip("transformers")

VOCAB, WIDTH, LAYERS, HEADS = 99, 32, 2, 4
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 37,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
FIXED = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0}


def _config(name, **options):
    t = transformers
    classes = {
        "roberta": t.RobertaConfig,
        "bert": t.BertConfig,
        "distilbert": t.DistilBertConfig,
        "modernbert": t.ModernBertConfig,
        "vit": t.ViTConfig,
        "deit": t.DeiTConfig,
        "llama": t.LlamaConfig,
        "mistral": t.MistralConfig,
        "gemma": t.Gemma3TextConfig,
        "gpt2": t.GPT2Config,
        "t5": t.T5Config,
        "deberta": t.DebertaV2Config,
    }
    own = {
        "roberta": {"max_position_embeddings": 400},
        "modernbert": {
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "eos_token_id": 2,
        },
        "llama": {"num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": None},
        "mistral": {"num_key_value_heads": 2, "sliding_window": 8, "eos_token_id": None},
        "gemma": {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "eos_token_id": None,
        },
        "gpt2": {"n_positions": 1024, "eos_token_id": None},
        "t5": {"d_kv": 8, "num_decoder_layers": 2},
    }
    if name in ("vit", "deit"):
        common = {key: COMMON[key] for key in list(COMMON)[1:5]} | {
            "image_size": 32,
            "patch_size": 8,
        }
    else:
        common = COMMON
    return classes[name](**(common | own.get(name, {}) | options))


MODELS = {
    "roberta": "RobertaModel",
    "bert": "BertModel",
    "distilbert": "DistilBertModel",
    "modernbert": "ModernBertModel",
    "vit": "ViTModel",
    "deit": "DeiTModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5EncoderModel",
    "deberta": "DebertaV2Model",
}


def pytest_collection_modifyitems(items):
    """Batches here have two dozen tokens, and α and β from so few are warned of."""
    few = pytest.mark.filterwarnings("ignore::lln.errors.CalibrationWarning")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(few)


def pytest_report_header():
    return f"transformers: {transformers.__version__}"


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small lose to the threads that wait for each other, many times over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    """Make a tiny random model: ``tiny("roberta", attention="lln")``."""
    from lln.integrations.transformers import register

    register()

    def make(name, attention=None, lln=None, model=None, **options):
        torch.manual_seed(0)
        config = _config(name, **options)
        if attention is not None:
            config._attn_implementation = attention
        if lln is not None:
            config.lln = lln
        return getattr(transformers, model or MODELS[name])(config).eval()

    return make


@pytest.fixture
def text():
    """Make a batch of token ids: the second sequence is padded by ``padding`` tokens."""

    def make(tokens=12, batch=2, padding=0, side="right", seed=0):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCAB, (batch, tokens), generator=generator)
        mask = torch.ones_like(ids)
        if padding:
            place = slice(tokens - padding, None) if side == "right" else slice(0, padding)
            ids[1, place], mask[1, place] = 0, 0
        return {"input_ids": ids, "attention_mask": mask}

    return make


@pytest.fixture
def save_with_tokenizer():
    """Save a model with a tokenizer of few words and a folder of another library beside it."""

    def save(model, folder):
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {"[PAD]": 0, "[UNK]": 1} | {f"w{index}": index for index in range(2, 60)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
        )
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text("{}")

    return save
