"""A worker that never joins: `python -m tests.disaggregated.sleeping_worker`."""

import time

if __name__ == "__main__":
    time.sleep(600)
