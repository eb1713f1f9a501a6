// Put the sections of a run into the page.

document.getElementById("curves").append(STEPS.length ? usualCurves() : h("p", { class: "note" }, "No step is done yet."));
document.getElementById("timeline").append(timelineSection());
document.getElementById("mismatch").append(mismatchDashboard());
document.getElementById("samples").append(sampleBrowser());
document.getElementById("all").append(allMetrics());
