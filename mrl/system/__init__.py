"""Operating system services: child processes, shared memory, plug-ins, clocks, memory."""
