"""This room holds disaggregated runs: some ranks train, and others lead engines only."""
