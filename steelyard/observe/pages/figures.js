"use strict";
// Draws the figures of a report (observe/report/curves.py) into their places, one at a time.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const options = { displaylogo: false, responsive: true };
  const next = (number) => {
    if (number >= figures.length) return;
    const place = document.getElementById(`figure-${number}`);
    Plotly.newPlot(place, figures[number].data, figures[number].layout, options);
    setTimeout(next, 0, number + 1);
  };
  next(0);
})();
