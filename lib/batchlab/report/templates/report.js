// One button opens or closes the code of every cell.
"use strict";
const button = document.getElementById("toggle-code");
button.addEventListener("click", () => {
  const open = button.getAttribute("aria-pressed") !== "true";
  document.querySelectorAll("details.code").forEach((part) => { part.open = open; });
  button.setAttribute("aria-pressed", String(open));
  button.textContent = open ? "Hide all code" : "Show all code";
});
