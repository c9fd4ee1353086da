"use strict";
(function () {
  const table = document.getElementById("claims");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const chips = Array.from(document.querySelectorAll(".chip"));
  const text = document.getElementById("text");
  const shown = document.getElementById("shown");

  function filter() {
    const states = new Set(chips.filter((c) => c.getAttribute("aria-pressed") === "true").map((c) => c.dataset.state));
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const said = row.textContent.toLowerCase();
      row.hidden = !(states.has(row.dataset.state) && words.every((word) => said.includes(word)));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = count + " of " + rows.length;
  }

  function sort(head, place) {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const numbers = head.dataset.sort === "number";
    const value = (row) => row.cells[place].dataset.value;
    const key = (row) => (value(row) === "" || isNaN(value(row)) ? -Infinity : Number(value(row)));
    const order = (a, b) => (numbers ? key(a) - key(b) || 0 : value(a).localeCompare(value(b)));
    body.append(...rows.sort((a, b) => (down ? -1 : 1) * order(a, b)));
  }

  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      filter();
    });
  }
  text.addEventListener("input", filter);
  Array.from(table.tHead.rows[0].cells).forEach((head, place) => {
    head.querySelector("button").addEventListener("click", () => sort(head, place));
  });
})();
