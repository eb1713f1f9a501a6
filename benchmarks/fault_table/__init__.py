"""The table of `make faults`: one file a topic, beside the faults of `mrl drill`."""
