"""Several models in one server: a classifier of pictures, a text encoder for search, a decoder
that answers and a recogniser of speech; requests come in any order and number."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.half)


class Encoder(nn.Module):
    def __init__(self, width, depth, words):
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.layers(self.words(tokens))


def trunk(channels, widths):
    layers = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers)


with torch.device("cuda"):
    pictures = nn.Sequential(
        trunk(3, (64, 128, 256, 512, 512)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    ).eval()
    search = Encoder(768, 12, 30000).eval()
    speech = nn.LSTM(80, 640, 4, batch_first=True).eval()
    letters = nn.Linear(640, 40)
    decoder = Encoder(1024, 16, 50000).eval()
index = torch.zeros(150_000, 768, device="cuda")


def classify():
    batch = recorder.blank(recorder.draw.randint(1, 32), 3, 224, 224, dtype=torch.half)
    return pictures(batch).softmax(-1).topk(5)[1]


def find():
    tokens = recorder.blank(recorder.draw.randint(1, 16), recorder.draw.randrange(5, 128))
    wanted = F.normalize(search(tokens).mean(1), dim=-1)
    return (wanted @ index.t()).topk(20)[1]


def hear():
    sound = recorder.blank(1, recorder.draw.randrange(100, 3000), 80, dtype=torch.half)
    return letters(speech(sound)[0]).argmax(-1)


def reply():
    tokens = recorder.blank(1, recorder.draw.randrange(20, 700))
    for _ in range(recorder.draw.randint(1, 4)):
        last = F.linear(decoder(tokens)[:, -1], decoder.words.weight).argmax(-1)
        tokens = torch.cat([tokens, last[:, None]], 1)
    return tokens


for request in recorder.steps(48):
    with torch.inference_mode():
        recorder.draw.choice((classify, classify, find, find, hear, reply))().cpu()
    if request % 4 == 3:
        recorder.step()
