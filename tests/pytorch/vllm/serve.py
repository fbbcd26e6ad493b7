"""Serves four prompts with vLLM: serve.py FOLDER GRAPHS. FOLDER has a model's config.json. The last
line on stdout is JSON."""

import json
import sys

import torch
from vllm import LLM, SamplingParams


def main(folder, graphs):
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.9,
        # Nothing compiled: Inductor's kernels take minutes, and compute nothing here.
        compilation_config={"mode": 0, "cudagraph_mode": graphs},
    )
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (10, 50, 120, 300)]
    wanted = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, temperature=0)
    served = llm.generate(prompts, wanted)
    print(
        json.dumps(
            {
                "tokens": [len(one.outputs[0].token_ids) for one in served],
                "backend": torch.cuda.get_allocator_backend(),
                "live": torch.cuda.max_memory_allocated() >> 20,
                "held": torch.cuda.max_memory_reserved() >> 20,
            }
        ),
        flush=True,
    )


main(*sys.argv[1:])
