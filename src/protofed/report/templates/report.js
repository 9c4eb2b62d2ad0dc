"use strict";
// A click on a column's head sorts the table: numbers by value, largest first; the rest by text.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const body = table.tBodies[0];
      const numeric = [...body.rows].some((row) => row.cells[column].dataset.value !== undefined);
      const before = head.getAttribute("aria-sort");
      const up = before ? before === "descending" : !numeric;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const { value } = row.cells[column].dataset;
        return numeric ? (value === undefined ? null : Number(value)) : row.cells[column].textContent;
      };
      const compare = (a, b) => {
        if (a === null || b === null) return (a === null) - (b === null);  // empty cells last
        const order = numeric ? a - b : a.localeCompare(b, undefined, { numeric: true });
        return up ? order : -order;
      };
      [...body.rows].map((row) => [key(row), row])
        .sort((a, b) => compare(a[0], b[0]))
        .forEach(([, row]) => body.append(row));
    });
  });
}
// A table that is wider than its place says so until its last column is in view. On a narrow screen
// its main column stays in view: to the right, then beside the first column.
const places = [...document.querySelectorAll(".scroll")];
const cue = (place) => {
  const hidden = place.scrollWidth - place.clientWidth;
  place.style.setProperty("--first", `${place.querySelector("th").offsetWidth}px`);
  place.classList.toggle("wide", hidden > 1);
  place.classList.toggle("more", hidden - place.scrollLeft > 1);
};
const resized = new ResizeObserver((seen) => seen.forEach((entry) => cue(entry.target)));
for (const place of places) {
  place.addEventListener("scroll", () => cue(place), { passive: true });
  resized.observe(place);
}
// Print what is folded, too.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
