"""Sessions are tenants without a recipe's loop: a client posts one operation after the other."""
