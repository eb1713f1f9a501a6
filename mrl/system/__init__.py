"""What the operating system gives: child processes, shared memory, plug-ins, clocks, memory."""
