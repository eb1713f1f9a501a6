// The reward curve below the numbers of the outcome.

if (SERIES["reward/mean"]) {
  document.getElementById("reward-curve").append(chart({ title: "Reward", keys: ["reward/mean"], labels: ["mean"],
    spread: { key: "reward/mean", by: "reward/std" }, note: "band: one standard deviation", height: 260 }));
}
