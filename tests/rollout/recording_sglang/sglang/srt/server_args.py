"""Fields as given; the real ServerArgs parses the same ones in test_gpu_settings.py."""


class ServerArgs:
    def __init__(self, **fields):
        self.fields = fields
