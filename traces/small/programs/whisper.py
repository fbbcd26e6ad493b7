"""Speech, training: Whisper base on thirty seconds of sound and transcripts of varied lengths, bf16
autocast."""

import recorder
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

config = WhisperConfig(
    d_model=512,
    encoder_layers=6,
    decoder_layers=6,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
    encoder_ffn_dim=2048,
    decoder_ffn_dim=2048,
)
with torch.device("cuda"):
    model = WhisperForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in recorder.steps(5):
    sound = recorder.blank(8, 80, 3000, dtype=torch.float)
    words = recorder.blank(8, recorder.draw.randrange(20, 200))
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_features=sound, labels=words).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
