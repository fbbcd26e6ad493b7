"""The names and descriptions of the built-in programs. Does not import torch."""

from __future__ import annotations

PROGRAMS = {
    "llama": (
        "training of a model of LLaMA-7B's shape with 8 layers: bf16, AdamW, gradients accumulated "
        "over two batches"
    ),
    "lengths": (
        "training of a 350M decoder: autocast, AdamW, a different batch size and length at every "
        "step"
    ),
    "moe": (
        "training of a mixture of experts: the tokens per expert vary with the batch; batches are "
        "prefetched on a separate stream"
    ),
    "offload": (
        "training with activations copied to the host and back on a side stream, under "
        "record_stream"
    ),
    "generate": "serving: sequences arrive, grow their caches piece by piece, and leave",
    "small": "fine-tuning of a small encoder (a few hundred MiB): another length at every step",
    "vision": "training of a ResNet-50, with inference on batches of varying size in between",
    "graph": "training of a graph network on neighbourhoods that are sampled at every step",
    "adapters": "serving: one model, and the small weights of two hundred tasks that come and go",
}
