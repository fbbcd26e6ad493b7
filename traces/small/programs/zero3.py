"""ZeRO-3, a rank of eight: a Llama of 8 layers under DeepSpeed, bfloat16, parameters gathered ahead
and gradients reduced on streams of their own (overlap_comm), torch's AdamW."""

import collections
import os

import llama
import ranks
import recorder
import torch

ranks.begin(8)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="8", MASTER_ADDR="-", MASTER_PORT="0")

import deepspeed  # noqa: E402

# DeepSpeed asks whether the allocator has had to retry, which one of the pluggable kind cannot say.
torch.cuda.memory_stats = lambda device=None: collections.Counter()
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
    "zero_allow_untested_optimizer": True,
}
with deepspeed.zero.Init(config_dict_or_path=settings):
    model = llama.Llama(width=1536, heads=12, inner=4096)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
    config=settings,
    dist_init_required=False,
)
for _ in recorder.steps(5):
    loss = llama.loss_of(engine, recorder.blank(2, recorder.draw.randrange(512, 1024, 64)))
    engine.backward(loss)
    engine.step()
    recorder.step()
ranks.end()
