"""Run the Python of a README, block after block: ``python tests/readme.py [--all] README.md``.

Blocks share their names, as they do for a reader. A block that needs a package that is not
installed is skipped and reported, and so is a later block that uses its names. With ``--all`` that
is an error.
"""

import argparse
import ast
import importlib.util
import re
import sys
import tempfile
from pathlib import Path


def blocks_of(text):
    return re.findall(r"^```python\n(.+?)^```", text, re.DOTALL | re.MULTILINE)


def run(text, names):
    """Run the blocks with these names; returns the number run and ``{block: missing package}``."""
    blocks, skipped, lost = blocks_of(text), {}, {}
    for number, block in enumerate(blocks, 1):
        try:
            exec(compile(block, f"<block {number}>", "exec"), names)
        except Exception as error:
            package = missing_package(error) or lost.get(getattr(error, "name", None))
            if package is None:
                raise
            skipped[number] = package
            lost |= dict.fromkeys(assigned(block) - names.keys(), package)
    return len(blocks) - len(skipped), skipped


def missing_package(error):
    """The package that is not installed and caused this error, or None."""
    while error is not None:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if package and isinstance(error, ImportError) and importlib.util.find_spec(package) is None:
            return package
        error = error.__cause__ or error.__context__
    return None


def assigned(block):
    """Names that a block gives a value, by assignment or import."""
    names = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def names_of_the_reader(folder):
    """What a README leaves to its reader: texts, and a checkpoint if transformers is there."""
    names = {"texts": [f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 34)], "folder": folder}
    if importlib.util.find_spec("transformers") is not None:
        save_checkpoint(folder)
    return names


def save_checkpoint(folder):
    """A tiny random BERT with a tokenizer of few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=64, intermediate_size=37, **sizes)).save_pretrained(folder)
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{index}": index for index in range(2, 60)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=Path)
    parser.add_argument("--all", action="store_true", help="fail where a block is skipped")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ran, skipped = run(options.readme.read_text("utf-8"), names_of_the_reader(folder))
    print(f"{options.readme.name}: {ran} of {ran + len(skipped)} Python blocks ran")
    for number, package in skipped.items():
        print(f"block {number} skipped: {package} is not installed")
    sys.exit(1 if not ran or (options.all and skipped) else 0)


if __name__ == "__main__":
    main()
