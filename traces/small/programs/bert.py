"""Text, fine-tuning: BERT base for classification, half precision with a scaler, batches padded to
their longest text, an evaluation in between."""

import recorder
import torch
from transformers import BertConfig, BertForSequenceClassification

with torch.device("cuda"):
    model = BertForSequenceClassification(BertConfig(num_labels=3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
scaler = torch.amp.GradScaler()


def batch(count):
    tokens = recorder.blank(count, recorder.draw.randrange(16, 200))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


for index in recorder.steps(6):
    model.train()
    texts, labels = batch(16), recorder.blank(16, high=3)
    with torch.autocast("cuda", torch.float16):
        loss = model(**texts, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if index % 3 == 2:
        model.eval()
        found = []
        with torch.no_grad():
            for _ in range(4):
                found.append(model(**batch(32)).logits)
        torch.cat(found).argmax(-1).cpu()
    recorder.step()
