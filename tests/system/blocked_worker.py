"""A worker of JsonWorker that answers with the signals that it blocks."""

import json
import signal
import sys

print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    blocked = sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    print(json.dumps({"number": json.loads(line)["number"], "blocked": blocked}), flush=True)
