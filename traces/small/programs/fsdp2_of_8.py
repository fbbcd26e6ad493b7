"""FSDP2, a rank of eight: the program of fsdp2 with a Llama twice as wide, parameters gathered
ahead and gradients reduced on streams of their own."""

import fsdp2
import llama

fsdp2.train(8, lambda: llama.Llama(width=2048, inner=5632), batch=2, steps=5)
