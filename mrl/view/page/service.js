// Put the curves of a service into its page.

document.getElementById("curves").append(STEPS.length ? chartGrid(SERVICE) : h("p", { class: "note" }, "No round is done yet."));
document.getElementById("all").append(allMetrics());
