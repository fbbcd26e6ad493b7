"""An American option by least squares: paths of price and variance are kept at every date, then
regressed backwards."""

import recorder
import torch

PATHS, DATES = 4_300_000, 126
price, variance = (
    torch.full((PATHS,), 100.0, device="cuda"),
    torch.full((PATHS,), 0.04, device="cuda"),
)
prices, variances = [], []
with torch.no_grad():
    for _ in recorder.steps(DATES):
        a = torch.randn(PATHS, device="cuda")
        b = -0.7 * a + 0.714 * torch.randn(PATHS, device="cuda")
        root = variance.clamp(min=0).sqrt()
        price = price * (0.0001 - variance / 504 + root * a * 0.063).exp()
        variance = variance + 1.5 * (0.04 - variance) / 252 + 0.3 * root * b * 0.063
        prices.append(price)
        variances.append(variance)
        recorder.step()
    worth = (100 - prices[-1]).clamp(min=0)
    for price, variance in zip(prices[-2::-1], variances[-2::-1]):
        one = torch.ones_like(price)
        basis = torch.stack(
            [one, price / 100, (price / 100).square(), variance, variance * price / 100], 1
        )
        weights = (basis.t() @ worth) / PATHS
        hold = basis @ weights
        now = (100 - price).clamp(min=0)
        worth = torch.where(now > hold, now, worth * 0.9999)
    worth.mean().item()
