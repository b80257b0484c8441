"""A run of two ranks that starts quickly: one layer, checkpoints, and a rank that is killed."""

import json
import os
import signal

import torch
import torch.distributed as dist

from lln.parallel import lln_attention, sum_gradients
from lln_lab.rank_checkpoints import load_newest, save_checkpoint


def train(folder, told, steps, every, killed_before):
    """Write the losses to a file; the second rank of the first start does not reach every step."""
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states = {"model": model, "optimizer": optimizer}
    first, content = load_newest(folder) or (0, {})
    for name, state in content.items():
        states[name].load_state_dict(state)
    for step in range(first + 1, steps + 1):
        if is_first_start and dist.get_rank() == 1 and step == killed_before:
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(step))
        own = model(tokens.chunk(2, 1)[dist.get_rank()]).unflatten(-1, (3, 1, 4))
        loss = lln_attention(*own.permute(2, 0, 3, 1, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        dist.all_reduce(total := loss.detach())
        if dist.get_rank() == 0:
            with told.open("a") as file:
                file.write(json.dumps({"step": step, "loss": total.item()}) + "\n")
            if step % every == 0:
                save_checkpoint(
                    folder, step, {name: one.state_dict() for name, one in states.items()}
                )
    dist.destroy_process_group()
