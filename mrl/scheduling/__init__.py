"""Decides what is generated before the trainer needs it, without IO, threads or a clock."""
