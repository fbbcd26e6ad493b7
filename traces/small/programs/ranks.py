"""A rank of torch.distributed, with torch's own ProcessGroupNCCL: its streams, its events, and what
it keeps alive until a collective is done.

The other ranks are not there: on the stand-in a collective is done at once, and leaves in the
receiver what the sender had. recorder.c says so many ranks of a communicator as are wanted."""

import recorder
import torch
import torch.distributed as dist


def begin(ranks):
    """Makes this process the first of `ranks`, before it has asked for memory."""
    if ranks > 1:
        recorder.mark(f"ranks {ranks}")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks)


def end():
    torch.cuda.synchronize()
    dist.destroy_process_group()
