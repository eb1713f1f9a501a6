"""Serves the policy to agents at an OpenAI-compatible address, and records what it samples for them.

server.py listens, app.py has the addresses, bodies.py reads requests, and answers.py writes responses.
record.py keeps the tokens of an episode in turns.py, messages.py compares and parses messages,
generation.py asks the engine, and agents.py runs the episodes of a run.
"""
