"""What mrl's child process takes from sglang.srt.utils."""


def kill_process_tree(pid, include_parent=True):
    pass
