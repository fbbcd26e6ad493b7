"""The built-in programs by name, without torch."""

from __future__ import annotations

PROGRAMS = {
    "llama": (
        "training of LLaMA-7B's shape with 8 layers: bf16, AdamW, gradients of two batches "
        "accumulated"
    ),
    "lengths": (
        "training of a 350M decoder: autocast, AdamW, another "
        "batch and length at every step"
    ),
    "moe": (
        "training of a mixture of experts: as many tokens an expert as the batch brings, "
        "prefetched on a stream of its own"
    ),
    "offload": (
        "training with activations copied to the host and back on a side stream, under "
        "record_stream"
    ),
    "generate": "serving: sequences come, their caches grow piece by piece, and go",
    "small": "fine-tuning of a small encoder (some hundred MiB): another length at every step",
    "vision": "training of a ResNet-50, and inference of batches of any size in between",
    "graph": "training of a graph network on neighbourhoods sampled anew at every step",
    "adapters": "serving: one model, and the small weights of two hundred tasks that come and go",
}
