"""A server that records what it is asked, and dies where SGLang's scheduler would.

The rules are those of SGLang 0.5.20, by file and symbol:

- release_memory_occupation asserts is_fully_idle() (managers/scheduler_components/weight_updater.py).
  A batch is not over with its last answer: last_batch holds it until the loop has turned once more.
- resume_memory_occupation removes each tag from offload_tags: KeyError for one that is awake.
- a batch reads weights, the KV cache and the CUDA graphs: on a GPU that sleeps they are unmapped.
- an update writes the weights, and must not meet a batch that reads them.
- flush_cache?timeout waits until the scheduler is idle (flush_wrapper.py).
- without skip_server_warmup a thread sends a request of its own, one second after the start
  (entrypoints/http_server.py, _execute_server_warmup; the second is a tenth here).
- torch_memory_saver refuses expandable segments (entrypoint.py, _sanity_checks).
"""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

TAGS = {"kv_cache", "weights", "cuda_graph"}
BATCH_S = 0.1
AFTERMATH_S = 0.05
"""The seconds for which the scheduler is not idle yet after a batch's answer is out."""


class Scheduler:
    """Its state, and the asserts."""

    def __init__(self, record):
        self._record = record
        self._lock = threading.Lock()
        self.asleep = set()
        self.num_running = 0
        self.busy_until = 0.0
        self.in_session = False

    def note(self, path, body):
        with self._lock, open(self._record, "a") as file:
            file.write(json.dumps([path, body]) + "\n")

    def must(self, condition, text):
        """SGLang's scheduler ends its process over a failed assert, and the server with it."""
        if not condition:
            self.note("DIED", {"assert": text})
            print(f"AssertionError: {text}", flush=True)
            os._exit(1)

    def is_idle(self):
        return not self.num_running and time.monotonic() >= self.busy_until

    def run_batch(self):
        self.must(not self.asleep, f"a batch ran while {sorted(self.asleep)} was released")
        self.num_running += 1
        time.sleep(BATCH_S)
        self.must(not self.asleep, f"{sorted(self.asleep)} was released under a running batch")
        self.num_running -= 1
        self.busy_until = time.monotonic() + AFTERMATH_S

    def generate(self, body):
        self.run_batch()
        many = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if many else [body["input_ids"]]
        params = body["sampling_params"]
        params = params if isinstance(params, list) else [params] * len(prompts)
        return [
            _answer(prompt, one, index)
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]

    def release(self, tags):
        self.must(self.is_idle(), "release_memory_occupation: the server is not idle")
        self.asleep |= set(tags)

    def resume(self, tags):
        self.must(set(tags) <= self.asleep, f"resume of {tags}, of which some are awake: KeyError")
        self.asleep -= set(tags)

    def update(self):
        self.must("weights" not in self.asleep, "an update wrote to released weights")
        self.must(not self.num_running, "an update under a running batch")

    def flush(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not self.is_idle():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True


def _answer(prompt, params, index):
    num = params["max_new_tokens"]
    lines = [[-0.5, 1, None]] * num
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(prompt),
        "completion_tokens": num,
        "cached_tokens": 0,
        "output_token_logprobs": lines,
        "input_token_logprobs": [[None, prompt[0], None], *([-0.5, t, None] for t in prompt[1:])],
        "weight_version": VERSION[0],
        "num_retractions": 0,
    }
    return {"index": index, "output_ids": [1] * num, "meta_info": meta}


VERSION = ["0"]


class Handler(BaseHTTPRequestHandler):
    scheduler: Scheduler
    has_sessions = False
    held: dict = {}  # noqa: RUF012

    def do_GET(self):
        if self.path in ("/begin_weight_update", "/end_weight_update"):
            return self._send(405 if self.has_sessions else 404, {})
        if self.path == "/server_info":
            room = {"memory_usage": {"token_capacity": 1 << 20}, "page_size": 1}
            return self._send(200, {"internal_states": [room]})
        return self._send(200, {})

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlparse(self.path).path
        body = json.loads(text)
        self.scheduler.note(path, body)
        scheduler = self.scheduler
        if path == "/generate":
            answers = scheduler.generate(body)
            return self._stream(body, answers) if body.get("stream") else self._send(200, answers)
        if path == "/release_memory_occupation":
            scheduler.release(body["tags"])
        elif path == "/resume_memory_occupation":
            scheduler.resume(body["tags"])
        elif path in ("/begin_weight_update", "/end_weight_update"):
            scheduler.in_session = path.startswith("/begin")
        elif path == "/flush_cache":
            timeout_s = float(dict([urlparse(self.path).query.split("=")])["timeout"])
            return self._send(200 if scheduler.flush(timeout_s) else 400, {"success": True})
        elif path.startswith("/update_weights"):
            scheduler.update()
            scheduler.must(scheduler.in_session or not self.has_sessions, "no update session")
            VERSION[0] = body.get("weight_version", VERSION[0])
        elif path == "/weights_checker":
            return self._send(200, {"success": True, "ranks": [{"checksums": self.held}]})
        return self._send(200, {"success": True})

    def _send(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, body, answers):
        self.send_response(200)
        self.end_headers()
        for rid, answer in zip(body["rid"], answers, strict=True):
            answer["meta_info"]["id"] = rid
            self.wfile.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


def _num_starts(fields):
    """Nodes that have come to this address."""
    with open(os.environ["MRL_RECORD"]) as file:
        starts = [body for path, body in map(json.loads, file) if path == "START"]
    address = fields.get("dist_init_addr")
    return sum(body["args"].get("dist_init_addr") == address for body in starts)


def run_server(server_args):
    fields = server_args.fields
    scheduler = Scheduler(os.environ["MRL_RECORD"])
    if fields.get("node_rank") and os.environ.get("MRL_RECORD_NODE_FAILS"):
        raise RuntimeError("no room on this node")
    fields = {name: value for name, value in fields.items() if name != "api_key"}
    scheduler.note("START", {"args": fields, "environment": dict(os.environ)})
    scheduler.must(
        "expandable_segments:True" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "TorchMemorySaver is disabled for the current process",
    )
    if fields.get("node_rank"):  # it follows node 0, and serves nobody
        threading.Event().wait()
    while _num_starts(fields) < fields.get("nnodes", 1):
        time.sleep(0.02)
    Handler.scheduler = scheduler
    Handler.has_sessions = bool(os.environ.get("MRL_RECORD_SESSIONS"))
    with open(os.environ["MRL_RECORD_HELD"]) as file:
        Handler.held = json.load(file)
    VERSION[0] = fields["weight_version"]
    if not fields["skip_server_warmup"]:

        def warm_up():
            time.sleep(0.1)
            scheduler.note("SGLANG_WARMUP", {})
            scheduler.run_batch()

        threading.Thread(target=warm_up, daemon=True).start()
    ThreadingHTTPServer((fields["host"], fields["port"]), Handler).serve_forever(0.02)
