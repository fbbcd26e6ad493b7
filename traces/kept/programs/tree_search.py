"""Search in trees of a game, many games at once: each simulation adds nodes whose hidden states,
policies and values are kept until the move is made."""

import recorder
import torch
from torch import nn

GAMES, PLANES, SIZE, MOVES = 40, 64, 9, 82


def tower(inside, depth):
    return (
        nn.Sequential(
            nn.Conv2d(inside, PLANES, 3, 1, 1),
            nn.ReLU(),
            *[m for _ in range(depth) for m in (nn.Conv2d(PLANES, PLANES, 3, 1, 1), nn.ReLU())],
        )
        .cuda()
        .eval()
    )


see, go = tower(17, 4), tower(PLANES + 1, 3)
policy, value = nn.Linear(PLANES * 81, MOVES).cuda(), nn.Linear(PLANES * 81, 1).cuda()
moves = []
with torch.no_grad():
    for move in recorder.steps(4):
        state = see(recorder.blank(GAMES, 17, SIZE, SIZE, dtype=torch.float))
        nodes = [(state, policy(state.flatten(1)).softmax(1), value(state.flatten(1)))]
        visits = torch.zeros(GAMES, MOVES, device="cuda")
        for _ in range(50):
            parent = recorder.draw.choice(nodes[-12:])
            act = (
                (parent[1] * (1 + visits.sum(1, keepdim=True)).sqrt() / (1 + visits))
                .argmax(1)
                .clamp(0, 0)
            )
            plane = torch.zeros(GAMES, 1, SIZE, SIZE, device="cuda")
            plane.flatten(1).scatter_(1, act[:, None], 1.0)
            state = go(torch.cat([parent[0], plane], 1))
            flat = state.flatten(1)
            nodes.append((state, policy(flat).softmax(1), value(flat).tanh()))
            visits.scatter_add_(1, act[:, None], torch.ones(GAMES, 1, device="cuda"))
            recorder.step()
        moves.append(
            (visits / visits.sum(1, keepdim=True), torch.stack([n[2] for n in nodes]).mean(0))
        )
