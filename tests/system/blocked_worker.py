"""A worker of JsonWorker that answers with the signals that it blocks."""

import json
import signal
import sys

print(json.dumps({"ready": True}), flush=True)
for _ in sys.stdin:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print(json.dumps({"blocked": sorted(int(number) for number in blocked)}), flush=True)
