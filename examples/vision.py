"""A vision transformer with LLN attention: Hugging Face's ViT, trained for a few steps.

    python examples/vision.py                   # a tiny random ViT, half a minute

The made-up task: is the bright square somewhere in the picture red, green or blue?
"""

import argparse

import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from lln.integrations.transformers import register

SIZE = 32


def pictures(count, generator):
    """Noise with a coloured square of 6 × 6 pixels, and its colour."""
    images = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    colours = torch.randint(3, (count,), generator=generator)
    corners = torch.randint(SIZE - 6, (count, 2), generator=generator)
    for image, colour, (x, y) in zip(images, colours, corners.tolist(), strict=True):
        image[colour, y : y + 6, x : x + 6] += 2
    return images, colours


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", default="lln", choices=["lln", "lln_diag", "sdpa"])
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args(arguments)

    register()
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIZE,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=3,
        attn_implementation=options.attention,
    )
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        images, labels = pictures(64, generator)
        loss = F.cross_entropy(model(images).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        images, labels = pictures(256, generator)
        accuracy = (model(images).logits.argmax(-1) == labels).float().mean().item()
    print(f"{options.attention}: {(SIZE // 4) ** 2 + 1} tokens, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
