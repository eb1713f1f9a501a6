"""Engines that are added to a job, and removed from it, while the job is running."""
