"""Takes the place of SGLang in the server process of test_gpu_rehearsal.py."""
