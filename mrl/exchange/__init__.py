"""Samples and their routes travel here from the ranks that roll out to the ranks that train."""
