"""SGLang plugin: routes leave the scheduler through memory that the trainer reads, not in messages.

SGLang would send int32 ids to the detokenizer, which encodes them as base64 for the HTTP server, which
puts them into JSON. With this plugin the scheduler writes the ids into memory and sends a reference of
about 100 bytes instead. If the scheduler cannot read the trainer's memory, as on another node, or too
many bytes wait to be read, the ids are sent in messages, as without the plugin. See
mrl/engines/sglang/route_memory.py.
"""

from mrl.engines.sglang.compat import hook

writers = []
"""At most one entry: the writer of this process, added when it first sends routes. It is None if the
process cannot read the trainer's memory."""


def register():
    hook("SenderWrapper.send_output", with_references, "BEFORE")


def with_references(sender, output, *args, **options):
    """Replace routes by references before SenderWrapper.send_output sends them. Do nothing on a
    rank without a socket, because it sends nothing."""
    routes = getattr(output, "routed_experts", None)
    if not routes or sender.socket is None:
        return
    if not writers:
        from mrl.engines.sglang.route_memory import make_writer

        writers.append(make_writer())
    if writers[0] is not None:
        output.routed_experts = [as_reference(each) for each in routes]


def as_reference(routes):
    """Return a reference to the routes of one request, or the routes themselves if they cannot be
    written. `routes` is None until the request is finished."""
    reference = None if routes is None else writers[0].add(routes)
    return routes if reference is None else reference.as_tensor()
