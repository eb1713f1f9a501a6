"""The CUDA emulator itself: right kernels give right results, wrong ones are found out."""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulator import ORDERS, GuardedCopies
from torch import Tensor

NUM_THREADS = 256


@pytest.fixture
def run(emulator_samples, monkeypatch):
    """run(NAME, input f32[N], order=, size=) -> output f32[N], zero before; RuntimeError."""

    def run_sample(
        name: str, values: Tensor, order: str = "forward", size: int | None = None, seed: int = 0
    ) -> Tensor:
        monkeypatch.setenv("MRL_EMULATOR_ORDER", order)
        monkeypatch.setenv("MRL_EMULATOR_SEED", str(seed))
        output = torch.zeros(max(values.numel(), 9 * 64))
        scratch = torch.zeros(65, dtype=torch.int32)
        tensors = [values, output, scratch]
        copies = GuardedCopies(tensors)
        source, target, words = (ctypes.c_void_p(copies.address(tensor)) for tensor in tensors)
        num = ctypes.c_int64(values.numel() if size is None else size)
        error = emulator_samples.RunSample(name.encode(), source, target, num, words)
        if error:
            raise RuntimeError(error.decode())
        copies.copy_back()
        return output

    return run_sample


@pytest.fixture
def values() -> Tensor:
    """f32[256] over a wide range, so that another order of a sum shows in its bits."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(NUM_THREADS, generator=rng) * 10 ** torch.linspace(-3, 3, NUM_THREADS)


@pytest.mark.parametrize("order", ORDERS)
def test_block_sum_is_the_tree_of_its_shuffles(run, values, order) -> None:
    expected = values.view(-1, 32)
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    expected = torch.nn.functional.pad(expected.view(-1), (0, 24))
    while expected.numel() > 1:
        expected = expected[: expected.numel() // 2] + expected[expected.numel() // 2 :]
    assert torch.equal(run("block_sum", values, order)[:1], expected)


@pytest.mark.parametrize("order", ORDERS)
def test_mirror_needs_no_order(run, values, order) -> None:
    expected = values.flip(0) * 100 + values.flip(0)
    assert torch.equal(run("mirror", values, order)[:NUM_THREADS], expected)


@pytest.mark.parametrize("name", ["block_sum", "mirror"])
def test_missing_barrier_changes_results_in_some_order(run, values, name) -> None:
    right = run(name, values)
    racy = [run(f"{name}_racy", values, order) for order in ORDERS]
    assert not all(torch.equal(result, right) for result in racy)


def test_shuffles_move_values_as_cuda_says(run) -> None:
    num_lanes = 64
    got = run("shuffles", torch.arange(float(num_lanes))).view(-1, num_lanes)
    for thread in range(num_lanes):
        warp, lane = thread // 32 * 32, thread % 32
        group = lane // 8 * 8
        expected = [
            warp + (lane ^ 5),
            warp + (lane + 3 if lane + 3 < 32 else lane),
            warp + (lane - 3 if lane >= 3 else lane),
            warp + thread * 7 % 32,
            warp + (lane + 1 if lane + 1 < group + 8 else lane),
            warp + (lane - 1 if lane >= 1 else lane),
            int(thread == 5),
            1 << 4,
            int(warp == 32),
        ]
        assert got[:, thread].tolist() == expected, thread


def test_ticket_adds_in_one_order_and_arrival_does_not(run) -> None:
    rng = torch.Generator().manual_seed(1)
    values = torch.randn(5000, generator=rng) * 10 ** torch.linspace(-3, 3, 5000)
    one = run("ticket", values)[0]
    torch.testing.assert_close(one.double(), values.double().sum(), rtol=1e-5, atol=1e-2)
    for order in ORDERS:
        assert torch.equal(run("ticket", values, order)[0], one)
    assert len({float(run("ticket_arrival", values, order)[0]) for order in ORDERS}) > 1


def test_seeds_are_different_orders(run) -> None:
    rng = torch.Generator().manual_seed(1)
    values = torch.randn(5000, generator=rng) * 10 ** torch.linspace(-3, 3, 5000)
    sums = [float(run("ticket_arrival", values, "shuffled", seed=s)[0]) for s in (0, 0, 1, 2)]
    assert sums[0] == sums[1]
    assert len(set(sums)) > 1


@pytest.mark.parametrize("order", ORDERS)
def test_threads_may_leave_before_a_barrier(run, values, order) -> None:
    output = run("leave_early", values, order, size=100)
    assert torch.equal(output[:100], values[:100].flip(0))
    assert not output[100:].any()


def test_shared_memory_is_poisoned_for_each_block(run, values) -> None:
    assert run("uninitialized", values)[:NUM_THREADS].isnan().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent_barrier", r"DivergentBarrier: block \d, thread \d+: __syncthreads at .*"
         r"samples.cu:\d+, but thread \d+ waits in __syncthreads at .*samples.cu:\d+"),
        ("shuffle_after_exit", "thread 32: __shfl_xor_sync at .*, but thread 37 has exited"),
        ("shuffle_in_branch", r"__shfl_sync at .*samples.cu:\d+ needs all 32 lanes, but thread "
         r"\d+ waits in __syncthreads"),
        ("partial_warp", "needs all 32 lanes, but thread 40 does not exist"),
        ("trap", r"Trap: block \d, thread 3: __trap after: size: got 256, expected at most 3"),
        ("require", "size: expected at most 3"),
        ("misaligned", r"misaligned address at .*samples.cu:\d+"),
        ("index_too_large", r"index out of bounds at .*samples.cu:\d+"),
        ("no_blocks", "Nothing: invalid configuration: got 0 blocks of 256 threads"),
        ("too_many_threads", "invalid configuration: got 8 blocks of 1025 threads"),
    ],
)  # fmt: skip
def test_error_is_reported(run, values, order, name, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(name, values, order)
    run("block_sum", values, order)  # the failed launch left nothing behind


def test_no_byte_past_a_tensor_can_be_read(run, values) -> None:
    assert run("read_last", values)[0] == values[-1]
    for _ in range(2):  # the handler is there again after a fault
        with pytest.raises(RuntimeError, match=r"ReadLast: block 0, thread 0: bad address 0x"):
            run("read_last", values, size=NUM_THREADS + 1)


def test_a_byte_written_beside_a_tensor_is_found() -> None:
    tensor = torch.arange(5, dtype=torch.uint8)
    copies = GuardedCopies([tensor, tensor[1:]])
    address = copies.address(tensor[1:])
    ctypes.memset(address, 9, 4)
    copies.copy_back()
    assert tensor.tolist() == [0, 9, 9, 9, 9]
    for place in (5, -1):
        copies = GuardedCopies([tensor])
        ctypes.memset(copies.address(tensor) + place, 0, 1)
        with pytest.raises(RuntimeError, match=f"byte {place} was written, .* of 5 bytes"):
            copies.copy_back()


def test_unknown_order_is_named(run, values) -> None:
    with pytest.raises(RuntimeError, match="MRL_EMULATOR_ORDER: got sideways, expected forward"):
        run("block_sum", values, "sideways")


def test_fixture_wants_a_known_order_and_a_kernel(emulated_cuda) -> None:
    message = "order: got 'sideways', expected one of"
    with pytest.raises(ValueError, match=message), emulated_cuda("sideways"):
        pass
    with pytest.raises(AssertionError, match="no kernel ran"), emulated_cuda("reverse"):
        pass
