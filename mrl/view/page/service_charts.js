// The curves of a service over its rounds.

const tenantOf = (key) => key.split("/")[1];
const PARTS_OF_ROUND = /^time\/(?!round_s).*_s$/;
const SERVICE = [
  { title: "How full the engine was", match: ["service/engine_occupancy", "service/kv_occupancy", "service/kv_counted"] },
  { title: "Requests that ran", match: ["service/running_requests"] },
  { title: "Tenants at once", match: ["service/phase_tenants", "service/batch_tenants"] },
  { title: "Mix of the batches", match: [/^service\/[^/]+\/batch_share$/], stacked: true, label: tenantOf },
  { title: "Generated tokens", match: [/^service\/[^/]+\/tokens$/], stacked: true, label: tenantOf },
  { title: "Wait of a request at the gate", match: [/^service\/[^/]+\/gate_wait_s$/], label: tenantOf },
  { title: "Wait for the trainer", match: [/^service\/[^/]+\/queue_age_s$/], label: tenantOf },
  { title: "Share of the trainer", match: [/^service\/[^/]+\/trainer_share$/], stacked: true, label: tenantOf },
  { title: "Update", match: [/^service\/[^/]+\/update_s$/], label: tenantOf },
  { title: "Swap", match: [/^service\/[^/]+\/swap_s$/], label: tenantOf },
  { title: "Seconds a round", match: [PARTS_OF_ROUND], stacked: true },
  { title: "Round time", match: ["time/round_s"] },
];
