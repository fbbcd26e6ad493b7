"""More than there is: torch's own exception, with the text that tools look for, and the program
goes on."""

import torch

import gpu

gpu.install()
kept = []
caught = None
try:
    for _ in range(1000):
        kept.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    caught = error
gpu.check_books(seen=len(kept) * (64 << 20))
message = str(caught)
facts = {
    "type": type(caught).__name__,
    "arguments": len(caught.args),
    "message": message,
    "blocks": len(kept),
}
del kept[::2]
# Fits only where freed memory is put together again, or given back and taken anew.
after = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
after.zero_()
again = 0
for _ in range(5):
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        again += 1
del after, caught
kept.clear()
gpu.check_nothing_is_left()
gpu.report(**facts, again=again)
