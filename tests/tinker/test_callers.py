"""Many callers at a time: those who have no key, or wait, keep nobody out."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from mrl.tinker.app import LIMITS
from parallel.checkpoint.manifest import folder_name, write_manifest
from tests.tinker.conftest import Api
from tests.waiting import LIMIT_S


def test_connections_without_a_key_keep_nobody_out(api: Api) -> None:
    host, _, port = api.server.address.removeprefix("http://").partition(":")
    with ExitStack() as held:
        strangers = [
            held.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT_S))
            for _ in range(2 * LIMITS.unread)
        ]
        assert api.ask("sessions", method="GET")["sessions"] == []
        assert strangers[0].recv(1000).startswith(b"HTTP/1.1 503 ")
        for each in strangers[-3:]:
            each.sendall(b"GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while part := each.recv(1000):  # until the service ends the connection
                answer += part
            assert answer.startswith(b"HTTP/1.1 401 ")


def test_samplers_that_are_being_opened_hold_no_thread(api: Api) -> None:
    session = api.session()
    model, num_samplers = api.model(session), LIMITS.threads + 10
    api.ask("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "one"})
    (operation,) = api.taken(model)
    runs = api.server.calls.backend.run_folder(api.tenant(model).name)
    folder = runs / "samplers" / "one" / folder_name(1)
    folder.mkdir(parents=True)
    write_manifest(folder, {"step": 1}, {})
    api.answer(model, operation, {"version": 1, "folder": str(folder), "name": "one"})
    api.ask("unload_model", {"model_id": model})
    with ThreadPoolExecutor(num_samplers) as pool:
        made = [
            pool.submit(
                api.ask,
                "create_sampling_session",
                {
                    "session_id": session, "sampling_session_seq_id": n,
                    "model_path": f"tinker://{model}/sampler_weights/one",
                },
            )
            for n in range(num_samplers)
        ]  # fmt: skip
        end, hosts = time.monotonic() + LIMIT_S, []
        while not hosts and time.monotonic() < end:
            hosts = [t for t in api.registry.tenants() if t.name.startswith("tk-host-")]
        for _ in range(3):
            time.sleep(0.2)  # until all of them have been taken
            api.ask("get_server_capabilities", method="GET")
        assert not any(each.done() for each in made)
        api.registry.operations.begin(hosts[0].incarnation, 0)
        assert len({each.result()["sampling_session_id"] for each in made}) == num_samplers
    copies = api.server.calls.backend.run_folder(hosts[0].name) / "samplers"
    assert [each.name.partition(".")[0] for each in copies.iterdir()] == ["copy"]
