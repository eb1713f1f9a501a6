"""Programs that run in workers, each as a script. They import nothing of mrl, but one another."""
