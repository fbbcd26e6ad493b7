"""Preprocessing of recordings: two streams take turns to resample, filter and write mel
spectrograms to pinned memory."""

import random

import recorder
import torch
import torch.nn.functional as F

rng = random.Random(48)
streams = [torch.cuda.Stream() for _ in range(2)]
window = torch.hann_window(2048).cuda()
mel = torch.zeros(1025, 128).cuda()
taps = torch.zeros(1, 1, 511).cuda()
dct = torch.zeros(128, 40).cuda()
torch.cuda.synchronize()


def process(wave):
    x = F.conv1d(wave[None, None], taps, padding=255)
    x = F.interpolate(x, scale_factor=0.5, mode="linear")[0, 0]
    x = x - 0.97 * F.pad(x, (1, 0))[:-1]
    x = x / x.abs().amax().clamp(min=1e-5)
    spectrum = torch.stft(x, 2048, 512, window=window, return_complex=True)
    power = spectrum.abs().square()
    # Percussive and harmonic parts by smoothing along each axis.
    harmonic = F.avg_pool1d(power[None], 31, 1, 15)[0]
    percussive = F.avg_pool1d(power.T[None], 31, 1, 15)[0].T
    mask = harmonic / (harmonic + percussive + 1e-9)
    features = []
    for part in (power, power * mask, power * (1 - mask)):
        features.append(torch.log10(part.T @ mel + 1e-10))
    features.append(F.pad(features[0] @ dct, (0, 88)))
    return torch.stack(features)


for step in recorder.steps(12):
    waiting = []
    for i in range(8):
        stream = streams[i % 2]
        seconds = rng.uniform(10, 100)
        host = torch.zeros(int(seconds * 44100), dtype=torch.int16).pin_memory()
        with torch.cuda.stream(stream):
            wave = host.cuda(non_blocking=True).float() / 32768
            features = process(wave)
            result = torch.empty(features.shape, dtype=torch.half, pin_memory=True)
            result.copy_(features.half(), non_blocking=True)
            event = stream.record_event()
        waiting.append((result, event))
        if len(waiting) > 4:
            waiting.pop(0)[1].synchronize()
    for _, event in waiting:
        event.synchronize()
    recorder.step()
