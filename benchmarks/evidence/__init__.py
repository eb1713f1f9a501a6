"""Every measurement behind a claim of mrl: how to repeat it, and whether the code has changed since."""
