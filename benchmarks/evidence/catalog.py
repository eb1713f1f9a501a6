"""This module lists every evidence target: its command, its results, and which files it measures.

Tests hold the table to the repository: each pattern names at least one file, each module has a `main`
that parses its arguments, each result is on file, and nothing else lies in benchmarks/results/.
"""

from __future__ import annotations

from dataclasses import dataclass

RECIPE = "launch/recipes/toy_moe.yaml"
PASSES = (
    "parallel/*.py",
    "parallel/optimizer",
    "parallel/layers",
    "parallel/architectures",
    "moe",
    "mrl/kernels/*.py",
    "csrc",
)
"""What every forward or backward pass goes through."""
ENGINE = ("mrl/engines", "mrl/system/processes.py", "mrl/system/json_worker.py")
ROLLOUT = (*ENGINE, "mrl/collect/*.py", "mrl/collect/endpoint/generation.py")
"""What rollouts go through; those of agents also go through the rest of mrl/collect/endpoint."""
STEP = (*PASSES, *ROLLOUT, "mrl/learn", "mrl/trainer.py")
RANKS = (
    *("tests/ranks.py", "tests/parallel/layouts.py", "tests/parallel/adapters.py"),
    "tests/parallel/conftest.py",
)
STEPPED = ("tests/loop/stepped.py",)


@dataclass(frozen=True)
class Target:
    """A target is one measurement: its command and the files that its figures depend on."""

    name: str
    tells: str
    """What a reader learns from it, in a few words."""
    arguments: tuple[str, ...]
    """What follows `python -m`."""
    results: tuple[str, ...]
    """The files of benchmarks/results/ without `.json`; the command writes the first of them."""
    measures: tuple[str, ...]
    """Paths of files or folders, where `*` stands for any name in one folder."""
    minutes: float
    """How long it takes on two cores, roughly."""
    short: str = ""
    """The test in which `make test` runs a part of it; empty where there is none."""
    group: str = ""
    """The Makefile target that runs it together with others."""
    needs_gpu: bool = False
    only_by_name: bool = False
    """Whether it runs only where it is named."""

    @property
    def is_study(self) -> bool:
        """Whether it answered a question once. Its result is not repeated with every release, and
        does not become stale."""
        return self.arguments[0].startswith("studies.")


TARGETS = (
    Target("first-hour", "the commands of docs/first_hour.md, as a new user gives them",
           ("benchmarks.first_hour",), ("first_hour",),
           (*STEP, "mrl", "parallel", "launch/tinker_loop.py", "launch/recipes/agent.yaml",
            "launch/recipes/guess_agent.py", "benchmarks/smollm",
            "benchmarks/first_hour.py"), 12, short="tests/benchmarks/test_first_hour.py"),
    Target("layouts", "every parallel layout against one process",
           ("benchmarks.layouts",), ("layouts",),
           (*PASSES, "mrl/algorithms/gspo.py", "mrl/learn/batching.py", *RANKS,
            "parallel/lora", "tests/parallel/models.py", "benchmarks/layouts.py"), 9,
           short="tests/parallel/test_layouts.py"),
    Target("conformance", "the contract of an engine, against a real SGLang",
           ("benchmarks.conformance",), ("conformance", "conformance_gpu"),
           (*ENGINE, "mrl/system", "mrl/kernels/digest.py", "tests/rollout/conformance",
            "tests/rollout/rollout_helpers.py", "benchmarks/conformance.py"), 17,
           short="tests/rollout/conformance"),
    Target("faults", "every fault of the table, each recovered or refused",
           ("benchmarks.faults",), ("faults",),
           (*ROLLOUT, "mrl/trainer.py", "mrl/drill", "mrl/launch", "mrl/run", "mrl/preflight",
            "mrl/system", "parallel/checkpoint", RECIPE, "benchmarks/faults.py",
            "benchmarks/fault_table"), 15, short="tests/drill"),
    Target("kills", "100 kill -9 of anything at random moments, 100 resumes to the bit",
           ("benchmarks.kill_anything",), ("kills",),
           (*STEP, "mrl/drill", "mrl/launch", "mrl/run", "mrl/system", "parallel/checkpoint",
            RECIPE, "benchmarks/kill_anything.py", "benchmarks/fault_table"), 60,
           short="tests/drill"),
    Target("soak", "500 steps of the demo with a fault every 20, beside the demo without",
           ("benchmarks.soak",), ("soak",),
           (*STEP, "mrl/drill", "mrl/launch", "mrl/run", "mrl/system", "parallel/checkpoint",
            RECIPE, "benchmarks/soak.py", "benchmarks/fault_table"), 50, short="tests/drill"),
    Target("process-table", "SIGSTOP and SIGKILL of every process of a job in every phase",
           ("benchmarks.process_table",), ("process_table",),
           (*ROLLOUT, "mrl/engine_pool/remote", "mrl/service", "mrl/trainer.py", "mrl/drill",
            "mrl/launch", "mrl/watch", "mrl/run", "mrl/rewards", "mrl/system",
            "parallel/checkpoint", RECIPE, "benchmarks/process_table.py",
            "benchmarks/process_strikes"), 120, short="tests/benchmarks/test_process_table.py"),
    Target("watchdog", "ranks hung at random moments, and what the watchdog says of them",
           ("benchmarks.watchdog",), ("watchdog",),
           ("mrl/watch", "mrl/system/heartbeat.py", "mrl/run/failure.py", "mrl/launch", RECIPE,
            "benchmarks/watchdog.py", "benchmarks/watched_rank.py"), 45,
           short="tests/loop/test_watchdog.py"),
    Target("async", "engines that run freely: the age of every token, 35 strikes, planted faults",
           ("benchmarks.asynchrony",), ("asynchrony",),
           (*ROLLOUT, "mrl/engine_pool/remote", "mrl/trainer.py", "mrl/drill", RECIPE,
            "benchmarks/asynchrony.py", "benchmarks/async_cases.py",
            "benchmarks/planted_versions.py"), 40, short="tests/disaggregated"),
    Target("placement", "colocated, beside the trainer, asynchronous: speed, idle time, reward",
           ("studies.placement",), ("placement",),
           (*STEP, "mrl/engine_pool/remote", "mrl/algorithms", "mrl/planner/placement.py",
            "studies/placement.py", "studies/placement_study", "benchmarks/start_model.py"), 40,
           short="tests/studies/test_placement.py"),
    Target("lora", "LoRA beside the training of all weights: reward, gap, weight syncs",
           ("studies.lora",), ("lora",),
           (*STEP, "parallel/lora", "mrl/algorithms", "mrl/config/lora.py", RECIPE,
            "studies/lora.py", "studies/lora_study", "benchmarks/start_model.py"),
           15, short="tests/studies/test_lora.py"),
    Target("tenants", "tenants at once beside one after another: speed, swaps, the same bits",
           ("benchmarks.tenants",), ("tenants",),
           (*STEP, "mrl/service", "parallel/lora", "launch/recipes/long_tail.yaml",
            "benchmarks/tenants.py", "benchmarks/tenants_load.py", "benchmarks/tenants_model.py",
            "benchmarks/tenants_engine.py", "benchmarks/tenants_split.py",
            "benchmarks/start_model.py"), 12,
           short="tests/benchmarks/test_tenants.py"),
    Target("training-pass", "the log-prob and training pass beside transformers",
           ("benchmarks.training_pass",), ("training_pass",),
           (*PASSES, "mrl/algorithms/gspo.py", "mrl/learn/batching.py", RECIPE,
            "benchmarks/training_pass.py"), 1, short="tests/loop/test_training_pass.py"),
    Target("shared_prefixes", "training with shared prefixes beside training without: speed, memory",
           ("benchmarks.shared_prefixes",), ("shared_prefixes",),
           (*PASSES, "mrl/algorithms/gspo.py", "mrl/learn/batching.py", "mrl/learn/packs.py",
            "mrl/toy_model.py", "benchmarks/shared_prefixes.py"), 12,
           short="tests/benchmarks/test_shared_prefixes.py"),
    Target("prefix_peers", "shared prefixes beside prefix-grouper and whole sequences in transformers",
           ("benchmarks.prefix_peers",), ("prefix_peers",),
           (*PASSES, "mrl/learn/batching.py", "mrl/learn/packs.py", "benchmarks/shared_prefixes.py",
            "benchmarks/prefix_peers.py"), 6,
           short="tests/benchmarks/test_prefix_peers.py"),
    Target("shared_layouts", "shared prefixes in every parallel layout",
           ("benchmarks.shared_layouts",), ("shared_layouts",),
           (*PASSES, "mrl/algorithms/gspo.py", "mrl/learn/batching.py", "mrl/learn/packs.py",
            *RANKS, "tests/parallel/shared_samples.py", "parallel/lora", "benchmarks/layouts.py",
            "benchmarks/shared_layouts.py"), 15,
           short="tests/parallel/test_shared_prefixes.py"),
    Target("stability", "6 corrections x 5 seeds with a bf16 engine and an fp32 trainer",
           ("studies.stability",), ("stability",),
           (*STEP, "mrl/algorithms", "launch/recipes/stability.yaml", *STEPPED,
            "studies/stability.py", "studies/stability_study", "benchmarks/start_model.py"), 30,
           short="tests/loop/test_stability.py"),
    Target("collapse", "does router mismatch make MoE RL collapse: 7 arms x 3 rates x 5 seeds",
           ("studies.collapse",), ("collapse",),
           (*STEP, "mrl/algorithms", "launch/recipes/collapse.yaml", *STEPPED, "studies/collapse.py",
            "studies/collapse_study", "studies/stability_study", "benchmarks/start_model.py"), 420,
           short="tests/studies/test_collapse.py"),
    Target("collapse-smollm", "the same on a pretrained model as a MoE: GRPO, R3, GSPO, 2 seeds",
           ("studies.collapse", "--model", "smollm"), ("collapse_smollm",),
           (*STEP, "mrl/algorithms", "parallel/upcycle.py", "launch/recipes/smollm.yaml",
            "launch/recipes/last_number.py", "benchmarks/smollm/sums.py", *STEPPED,
            "studies/collapse.py", "studies/collapse_study", "studies/stability_study",
            "benchmarks/start_model.py"), 120,
           short="tests/studies/test_collapse.py"),
    Target("quantization", "4 formats of an engine's weights x 4 corrections x 5 seeds",
           ("studies.quantization",), ("quantization",),
           (*STEP, "mrl/quantization.py", "mrl/weight_sync/quantize.py", "mrl/algorithms",
            "launch/recipes/stability.yaml", *STEPPED, "studies/quantization*.py",
            "studies/stability.py", "studies/stability_study", "benchmarks/start_model.py"), 80,
           short="tests/rollout/test_quantized_engine.py"),
    Target("quantization-smollm", "a pretrained model, dense and as a MoE, with an engine in fp8_block",
           ("studies.quantization", "--model", "smollm"), ("quantization_smollm",),
           (*STEP, "mrl/quantization.py", "mrl/weight_sync/quantize.py", "mrl/algorithms",
            "parallel/upcycle.py", "launch/recipes/smollm.yaml", *STEPPED,
            "studies/quantization*.py", "studies/stability.py", "studies/stability_study"), 60,
           short="tests/studies/test_quantization.py"),
    Target("fuzz", "damaged inputs for every parser of bytes from outside",
           ("benchmarks.fuzz", "--minutes", "15"), ("fuzz",),
           ("mrl/data", "mrl/config", "mrl/rewards", "mrl/run", "mrl/engines/sglang/decode.py",
            "mrl/view/series.py", "moe/trace.py", "parallel/hf_config.py",
            "parallel/hf_tensors.py", "parallel/checkpoint/manifest.py", RECIPE,
            "mrl/web", "mrl/tinker", "mrl/service/bodies.py", "mrl/service/control.py",
            "mrl/service/tokenizer.py", "mrl/service/sessions/bodies.py", "tests/tenants/parts.py",
            "tests/tinker/test_wire.py",
            "tests/sample_groups.py", "benchmarks/fuzz.py", "benchmarks/fuzz_parsers"), 16,
           short="tests/benchmarks/test_fuzz.py"),
    Target("throughput", "tokens per second beside a bare SGLang",
           ("benchmarks.throughput",), ("throughput",),
           (*ENGINE, "mrl/collect/single_turn.py", "benchmarks/throughput.py"), 3,
           group="rollout-bench"),
    Target("weight_sync", "what a weight sync costs; 100 faulty updates are caught",
           ("benchmarks.weight_sync",), ("weight_sync",),
           ("parallel/export.py", "parallel/weights.py", "parallel/hf_tensors.py", "mrl/engines",
            "mrl/system", "mrl/kernels/digest.py", "csrc/weight_digest.h", "csrc/cpu", *RANKS,
            "benchmarks/weight_sync.py", "benchmarks/weight_faults.py"), 2,
           short="tests/rollout/test_weight_sync.py", group="rollout-bench"),
    Target("route_wire", "bytes and time of routes between ranks",
           ("benchmarks.route_wire",), ("route_wire",),
           ("mrl/exchange", "moe", "mrl/run/rollouts.py", "tests/ranks.py",
            "benchmarks/route_wire.py"), 2,
           group="rollout-bench"),
    Target("replay_overhead", "what routing replay costs a step",
           ("benchmarks.replay_overhead", "toy", "--steps", "8"), ("replay_overhead",),
           (*STEP, "mrl/algorithms/gspo.py", RECIPE, "benchmarks/replay_overhead.py"), 2,
           group="rollout-bench"),
    Target("long_tail", "what over-sampling, resuming and deferring save and cost",
           ("studies.long_tail",), ("long_tail",),
           (*ROLLOUT, "mrl/data/repeat.py", "launch/recipes/long_tail.yaml", *STEPPED,
            "studies/long_tail.py"), 3),
    Target("bench", "kernels beside eager, torch.compile, Liger-Kernel, TRL and a copy",
           ("benchmarks.bench_kernels",),
           ("kernels_cpu",),
           ("mrl/kernels", "csrc", "parallel/layers/experts.py", "benchmarks/kernel_bench",
            "benchmarks/bench_kernels.py"), 15, short="tests/benchmarks/test_kernel_bench.py"),
    Target("peers", "the demo and long answers beside TRL, generation beside transformers",
           ("benchmarks.peers",), ("peers",),
           (*STEP, "mrl/engine_pool", RECIPE, "benchmarks/peers.py", "benchmarks/peer_runs"), 25,
           short="tests/benchmarks/test_peers.py"),
    Target("peer_rewards", "the rewards that mrl and TRL reach on the pretrained 135M model",
           ("studies.peer_rewards",), ("peer_rewards",),
           (*STEP, "launch/recipes/smollm.yaml", "launch/recipes/last_number.py",
            "studies/peer_rewards.py", "benchmarks/peers.py", "benchmarks/peer_runs"), 120,
           short="tests/benchmarks/test_peers.py"),
    Target("smollm", "a pretrained 135M model learns: dense, as a MoE with R3, with LoRA",
           ("benchmarks.smollm.measure",), ("smollm",),
           (*STEP, "mrl/engine_pool", "parallel/upcycle.py", "launch/recipes/smollm.yaml",
            "launch/recipes/last_number.py", "benchmarks/smollm"), 60,
           short="tests/benchmarks/test_smollm.py"),
    Target("tinker-smollm", "an RL loop by the Tinker SDK beside `mrl train`, pretrained 135M model",
           ("benchmarks.tinker_smollm",), ("tinker_smollm",),
           (*STEP, "mrl/service", "mrl/tinker", "launch/recipes/smollm.yaml",
            "launch/recipes/last_number.py", "benchmarks/tinker_smollm.py",
            "benchmarks/tinker_smollm_loop.py"), 60,
           short="tests/benchmarks/test_tinker_smollm.py"),
    Target("on_policy", "engine and trainer layer by layer, bit by bit",
           ("studies.on_policy",), ("on_policy",),
           (*PASSES, "mrl/engines", RECIPE, "studies/on_policy.py",
            "studies/on_policy_layers"), 9, short="tests/loop/test_on_policy.py"),
    Target("planted_faults", "faults planted into the real loop, and what `mrl why` finds",
           ("benchmarks.planted_faults",),
           ("planted_faults", "planted_faults_bfloat16", "planted_sizes", "planted_sizes_bfloat16"),
           ("mrl/diagnosis", "mrl/engines", "moe", "parallel/logprobs.py",
            "parallel/layer_hooks.py", RECIPE, *STEPPED, "benchmarks/planted_faults.py",
            "benchmarks/planted_engine.py"), 6, short="tests/loop/test_planted_faults.py"),
    Target("diagnosis_overhead", "what the diagnosis of a step costs",
           ("benchmarks.diagnosis_overhead",), ("diagnosis_overhead",),
           (*PASSES, "mrl/diagnosis", "mrl/learn/learner.py", RECIPE,
            "benchmarks/diagnosis_overhead.py", "benchmarks/replay_overhead.py"), 4),
    Target("route_memory", "routes from SGLang through shared memory and as base64 in JSON",
           ("benchmarks.route_memory",), ("route_memory",),
           ("mrl/engines/sglang", "mrl/system/shared_memory.py",
            "benchmarks/route_memory.py"), 2, short="tests/rollout/test_route_memory.py"),
    Target("world_step", "a step of 64 and of 256 ranks, seen from one of them",
           ("benchmarks.world_step",), ("world_step",),
           ("mrl/exchange", "mrl/run", "mrl/data/completions.py", "parallel/packing.py",
            "mrl/planner/rollouts.py", "parallel/checkpoint/shard_writer.py",
            "benchmarks/world_step.py", "benchmarks/shard_layout.py"), 2,
           short="tests/planner/test_rollouts.py"),
    Target("export_memory", "the memory and the time of a weight export",
           ("benchmarks.export_memory",), ("export_memory",),
           ("parallel/export.py", "parallel/weights.py", "parallel/hf_tensors.py",
            "parallel/shards.py", "mrl/system/shared_memory.py", *RANKS,
            "benchmarks/export_memory.py"), 1, short="tests/parallel/test_export_memory.py"),
    Target("delta_sync", "deltas of the weights beside whole versions: bytes, seconds, same bits",
           ("benchmarks.delta_sync",), ("delta_sync",),
           ("mrl/weight_sync", "mrl/kernels/weight_delta.py", "mrl/kernels/digest.py",
            "csrc/weight_delta.h", "csrc/cpu/weight_delta.cpp", "parallel/export.py",
            "mrl/quantization.py", *RANKS, "benchmarks/delta_*.py"), 45,
           short="tests/weight_sync/test_deltas.py"),
    Target("elastic", "engines added and removed at random over 100 steps: the bits of a calm run",
           ("benchmarks.elastic_engines",), ("elastic",),
           (*ROLLOUT, "mrl/engine_pool", "mrl/scheduling", "mrl/trainer.py", RECIPE,
            "benchmarks/elastic_*.py"), 40, short="tests/disaggregated/test_elastic.py"),
    Target("agent_runs", "ten steps of agents and environments from elsewhere on a pretrained model",
           ("benchmarks.agent_runs",), ("agent_runs",),
           (*STEP, "mrl/collect/endpoint", "mrl/environments", "launch/recipes/agents",
            "benchmarks/agent_runs.py", "benchmarks/episode_runs"), 30,
           short="tests/endpoint/test_runs.py"),
    Target("episodes", "a slow environment among fast ones, and 1,000 episodes at one time",
           ("benchmarks.episodes",), ("episodes",),
           (*STEP, "mrl/collect/endpoint", "mrl/environments", "mrl/engine_pool",
            "mrl/scheduling", "launch/recipes/multi_turn.yaml", "benchmarks/episodes.py",
            "benchmarks/episode_runs"),
           15, short="tests/environments/test_rollout.py"),
    Target("mutations", "50 random breaks of the core rooms, and which of them `make test` catches",
           ("benchmarks.mutations",), (),
           ("mrl", "parallel", "moe", "tests", "benchmarks/mutations.py"), 150,
           short="tests/benchmarks/test_mutations.py", only_by_name=True),
    Target("scaling", "the plans of the big recipes; writes docs/scaling.md",
           ("benchmarks.scaling",), (),
           ("mrl/planner", "launch/recipes", "benchmarks/scaling.py", "benchmarks/models"), 0.1,
           short="tests/benchmarks/test_scaling_doc.py"),
    Target("gpu-stack", "the GPU stack of docs/install.md, installed and run on a CPU",
           ("benchmarks.gpu_stack",), ("gpu_stack",),
           ("mrl/engines/sglang/names.py",
            "mrl/engines/sglang/settings.py", "mrl/engines/sglang/plugins",
            "parallel/megatron_names.py", "benchmarks/gpu_stack.py",
            "benchmarks/gpu_environment", "benchmarks/libcuda.py"), 20,
           short="tests/benchmarks/test_gpu_stack.py"),
    Target("gpu-check", "what only a GPU can show; continues where an earlier call ended",
           ("benchmarks.gpu_lane.run",), (), ("benchmarks/gpu_lane",), 10,
           short="tests/benchmarks/test_gpu_lane.py", needs_gpu=True),
)  # fmt: skip
BY_NAME = {target.name: target for target in TARGETS}


def target_of(result: str) -> Target:
    """Return the target that writes a result: one that lists it, or has its name before the result was
    ever written. Raises KeyError where none does."""
    for target in TARGETS:
        if result in target.results or result == target.name.replace("-", "_"):
            return target
    raise KeyError(f"no target of benchmarks/evidence/catalog.py writes {result}.json")


def chosen(names: list[str]) -> list[Target]:
    """Return the targets of these names or groups, in the order of the table; where none is given, all
    but studies and those that run only by name.

    Raises ValueError where a name is neither a target nor a group.
    """
    known = {*BY_NAME, *(target.group for target in TARGETS if target.group)}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"got {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
    if not names:
        return [t for t in TARGETS if not t.is_study and not t.only_by_name]
    return [t for t in TARGETS if t.name in names or t.group in names]
