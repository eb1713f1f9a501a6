"""SGLang plugin: routes leave the scheduler through memory that the trainer reads, not in messages.

SGLang would send int32 ids to the detokenizer, which makes base64 of them, which goes to the HTTP
server, which puts it into JSON. Here the scheduler lays the ids into memory and sends a reference of
some 100 bytes on that way. Where the trainer's memory cannot be read from here, as on another node, or
too much waits there, the ids go as SGLang sends them. See mrl/rollout/sglang/route_memory.py.
"""

from mrl.rollout.sglang.compat import hook

writers = []
"""The one of this process, once it has sent routes; None where there can be none."""


def register():
    hook("SenderWrapper.send_output", with_references, "BEFORE")


def with_references(sender, output, *args, **options):
    """SenderWrapper.send_output, before it sends; only the rank that sends has a socket."""
    routes = getattr(output, "routed_experts", None)
    if not routes or sender.socket is None:
        return
    if not writers:
        from mrl.rollout.sglang.route_memory import make_writer

        writers.append(make_writer())
    if writers[0] is not None:
        output.routed_experts = [as_reference(each) for each in routes]


def as_reference(routes):
    """Return the reference to the routes of one request; None until it is finished."""
    reference = None if routes is None else writers[0].add(routes)
    return routes if reference is None else reference.as_tensor()
