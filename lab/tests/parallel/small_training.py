"""A run for torchrun that starts quickly: one layer, checkpoints, and a loss per line."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lln.parallel import lln_attention, sum_gradients
from lln_lab.rank_checkpoints import load_newest, save_checkpoint


def main(folder, steps, every):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states = {"model": model, "optimizer": optimizer}
    first, content = load_newest(folder) or (0, {})
    for name, state in content.items():
        states[name].load_state_dict(state)
    for step in range(first + 1, steps + 1):
        tokens = torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(step))
        own = model(tokens.chunk(2, 1)[dist.get_rank()]).unflatten(-1, (3, 1, 4))
        loss = lln_attention(*own.permute(2, 0, 3, 1, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        dist.all_reduce(total := loss.detach())
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": total.item()}), flush=True)
            if step % every == 0:
                save_checkpoint(
                    folder, step, {name: one.state_dict() for name, one in states.items()}
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
