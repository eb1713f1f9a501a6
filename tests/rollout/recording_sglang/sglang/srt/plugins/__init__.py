"""SGLang's plug-ins touch its modules, which are not here."""


def load_plugins():
    pass
