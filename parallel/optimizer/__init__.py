"""The optimizer: Adam and Muon, how their state is divided and read, and settings of one step."""
