"""This room trains on some ranks of a job while other ranks generate."""
