"""Sessions: tenants whose training loop runs in a client, which posts one operation after
another."""
