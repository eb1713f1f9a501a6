"""This module has the engine of `benchmarks.tenants_model`: what it assumes of model and GPU, and how
fast it decodes. Lengths and sizes of memory are in tokens, times in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrl.service.schedule import Admission, Demand

COLOCATED, SPLIT, ASYNC = "colocated", "split", "split, asynchronous"


@dataclass(frozen=True)
class Assumptions:
    """Holds everything that the result depends on, beside the scheduler."""

    num_parameters: float = 4.02e9  # Qwen3-4B: embeddings are tied
    num_layers: int = 36
    num_kv_heads: int = 8
    num_heads: int = 32
    head_dim: int = 128
    bytes_a_number: int = 2  # bf16: weights and KV cache
    adapter_bytes: float = 132e6  # rank 32 on all linear layers: 66M parameters, read in every step
    gpu_bytes: float = 96e9  # GH200
    bandwidth: float = 4.0e12  # bytes a second
    bandwidth_share: float = 0.7  # of it that decoding reaches
    flops: float = 989e12  # bf16, dense
    prefill_share: float = 0.4
    training_share: float = 0.35
    split_memory: float = 0.85  # of the GPU for the engine: weights, KV cache and activations
    colocated_memory: float = 0.6  # of the GPU, as the trainer keeps some of it
    engine_bytes: float = 4e9  # activations and CUDA graphs
    decode_overhead_s: float = 0.003  # of a step: launches, sampling, the scheduler, LoRA's kernels
    switch_s: float = 5.0  # from rollout to training and back, where both share the GPUs; each way
    swap_s: float = 1.0  # of a tenant, in the trainer; 0 if it is alone
    publish_s: float = 2.0  # from the end of an update to the engines' new version
    update_overhead_s: float = 3.0  # rewards, batching, optimizer, synchronisation
    prompt_tokens: int = 200
    longest: int = 32_768
    median: float = 6_000.0  # of a log-normal distribution of answers, cut off at `longest`
    sigma: float = 1.0  # of log(length): 0.71 from the prompt and 0.71 from the sample
    groups_a_step: int = 32
    samples: int = 8
    groups_async: int = 67  # 538 requests: round(256 * 2.1), in whole groups
    steps_a_sync: int = 2
    seed: int = 0  # of the lengths; tenant n has the same answers in every arrangement

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_a_number

    def capacity(self, mode: str) -> int:
        """Return the tokens that the KV cache of an engine holds."""
        share = self.colocated_memory if mode == COLOCATED else self.split_memory
        weights = self.num_parameters * self.bytes_a_number
        return int((self.gpu_bytes * share - weights - self.engine_bytes) / self.kv_bytes)

    def step_s(self, batch: int, tenants: int) -> float:
        """Return the seconds of a decoding step without the reading of the KV cache."""
        read = self.num_parameters * self.bytes_a_number + tenants * self.adapter_bytes
        compute = 2 * self.num_parameters * batch / (self.flops * self.prefill_share)
        return self.decode_overhead_s + max(read / self.memory_rate, compute)

    @property
    def memory_rate(self) -> float:
        """Bytes a second that decoding reads."""
        return self.bandwidth * self.bandwidth_share

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds in which an engine computes the KV cache of so many tokens."""
        return 2 * self.num_parameters * tokens / (self.flops * self.prefill_share)

    def update_s(self, lengths: Sequence[int], num_gpus: int) -> float:
        """Return the seconds of an update on sequences of these lengths.

        Linear layers: old log-probs, forward, recompute, and a backward pass that needs no gradients of
        the frozen weights, 2 FLOPs a parameter and token each. Attention: five forward passes' worth.
        """
        linear = 8 * self.num_parameters * sum(lengths)
        width = self.num_heads * self.head_dim * self.num_layers
        attention = 5 * 2 * width * sum(length * length for length in lengths)
        return self.update_overhead_s + (linear + attention) / (
            num_gpus * self.flops * self.training_share
        )


@dataclass
class Request:
    """Is one answer: its group, and how many tokens it will have and has."""

    tenant: str
    group: int
    length: int
    done: int = 0


@dataclass
class Engine:
    """Decodes on one GPU; its memory is counted in tokens, as if no requests shared a prompt."""

    assumptions: Assumptions
    mode: str
    now: float = 0.0
    waiting: dict[str, deque[Request]] = field(default_factory=dict)
    running: list[tuple[int, int, Request, int]] = field(default_factory=list)
    """A heap of (step of its end, number, request, step of its start less its tokens)."""
    step: int = 0
    held: int = 0
    batch_s: float = 0.0
    held_s: float = 0.0
    busy_s: float = 0.0
    retracted: int = 0

    def __post_init__(self) -> None:
        self.admission, self.numbers = Admission(), itertools.count()
        self.capacity = self.assumptions.capacity(self.mode)

    def totals(self) -> tuple[float, float, float, int]:
        """Return the sums over time of requests and tokens, the busy seconds, and the retractions."""
        return self.batch_s, self.held_s, self.busy_s, self.retracted

    def seconds(self, num: int) -> float:
        """Return how long the next `num` steps of the present batch take."""
        batch = len(self.running)
        tenants = len({entry[2].tenant for entry in self.running[:50]})
        tokens = num * self.held + batch * num * (num - 1) / 2
        read = tokens * self.assumptions.kv_bytes / self.assumptions.memory_rate
        return num * self.assumptions.step_s(batch, tenants) + read

    def steps_ahead(self) -> int:
        """Return the steps until a request ends or the memory is full."""
        room = (self.capacity - self.held) // len(self.running)
        return min(self.running[0][0] - self.step, room)

    def next_time(self) -> float:
        return self.now + self.seconds(self.steps_ahead()) if self.running else math.inf

    def decode(self, num: int) -> None:
        took, batch = self.seconds(num), len(self.running)
        self.held_s += (self.held + batch * num / 2) * took
        self.batch_s += batch * took
        self.busy_s += took
        self.now += took
        self.step += num
        self.held += batch * num

    def wait_until(self, when: float) -> None:
        """Decode as many whole steps as fit before `when`, which is no later than the next event."""
        if not self.running:
            self.now = max(self.now, when)
            return
        low, high = 0, self.steps_ahead()
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.now + self.seconds(middle) <= when else (low, middle - 1)
            )
        self.decode(low)

    def event(self) -> list[Request]:
        """Decode until the next event; return what finished."""
        self.decode(self.steps_ahead())
        finished = []
        while self.running and self.running[0][0] == self.step:
            request = heapq.heappop(self.running)[2]
            tokens = self.assumptions.prompt_tokens + request.length
            self.held -= tokens
            self.admission.finished(request.tenant, tokens)
            finished.append(request)
        while self.running and self.held + len(self.running) > self.capacity:
            self.retract()
        self.admit()
        return finished

    def retract(self) -> None:
        """Put the request that started last back, as SGLang does; its tokens are kept."""
        entry = max(self.running, key=lambda each: each[1])
        self.running.remove(entry)
        heapq.heapify(self.running)
        request = entry[2]
        request.done = self.step - entry[3]
        self.held -= self.assumptions.prompt_tokens + request.done
        self.waiting[request.tenant].appendleft(request)
        self.retracted += 1

    def admit(self) -> None:
        if not any(self.waiting.values()):
            return
        prompt, longest = self.assumptions.prompt_tokens, self.assumptions.longest
        each = {
            tenant: self.admission.tokens_each(tenant, prompt + longest) for tenant in self.waiting
        }
        flying: Counter[str] = Counter()
        for _, _, request, start in self.running:
            flying[request.tenant] += max(each[request.tenant], prompt + self.step - start)
        demands = [
            Demand(tenant, 1.0, len(line), each[tenant], flying[tenant], self.capacity)
            for tenant, line in self.waiting.items()
        ]
        free = min(self.capacity - flying.total(), self.capacity - self.held)
        for tenant, number in self.admission.admit(free, self.capacity, demands).items():
            for _ in range(number):
                request = self.waiting[tenant][0]
                tokens = prompt + request.done
                if self.held + tokens + len(self.running) >= self.capacity:
                    break  # it was retracted, and holds more than is expected of a new one
                self.waiting[tenant].popleft()
                start = self.step - request.done
                heapq.heappush(
                    self.running, (start + request.length, next(self.numbers), request, start)
                )
                self.held += tokens
                prefill = self.assumptions.prefill_s(tokens)
                self.now += prefill
                self.busy_s += prefill
