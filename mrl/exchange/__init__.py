"""This room moves samples and their routes from the ranks that roll out to the ranks that train."""
