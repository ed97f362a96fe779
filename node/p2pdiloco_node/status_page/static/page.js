// Keeps the page live, says so when it is not, and finds your node. The page is complete without it.
"use strict";

const OLD_AFTER_MS = 15000; // limits.data_age_s_max
const sections = new Map([...document.querySelectorAll("[data-live]")].map((e) => [e.dataset.live, e]));
const banner = document.getElementById("feed");
const find = document.getElementById("find");
let heard = performance.now(); // a clock that no one sets
let wasOld = document.body.classList.contains("stale");

function mark() {
  const wanted = find.value.trim().toLowerCase();
  for (const row of document.querySelectorAll("tr[data-fingerprint]")) {
    const mine = wanted !== "" && (row.dataset.fingerprint === wanted || row.dataset.name.toLowerCase() === wanted);
    row.classList.toggle("me", mine);
  }
}

function show(message) {
  heard = performance.now();
  for (const [name, html] of Object.entries(message.sections)) {
    // The server escapes every text from outside; the policy of this page runs no script from HTML.
    const section = sections.get(name);
    if (section) section.innerHTML = html;
    if (name === "notice") wasOld = html.trim() !== "";
  }
  mark();
  offerCopy();
  age();
}

function offerCopy() {
  const copy = document.getElementById("copy");
  if (!copy || !copy.hidden || !navigator.clipboard) return;
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById("line").textContent);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
}

function age() {
  const silent = performance.now() - heard;
  const dead = silent > OLD_AFTER_MS;
  document.body.classList.toggle("stale", dead || wasOld);
  banner.hidden = !dead;
  const text = dead ? `Data is ${Math.floor(silent / 5000) * 5} s old: the tracker does not answer. Trying again; the nodes may well be training on.` : "";
  if (banner.textContent !== text) banner.textContent = text;
}

function connect() {
  const source = new EventSource("events");
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => {
    // The browser tries again by itself, except after a refusal.
    if (source.readyState !== EventSource.CLOSED) return;
    setTimeout(connect, 10000 + Math.random() * 10000);
  };
}

document.querySelector(".find").hidden = false;
try {
  find.value = localStorage.getItem("p2pdiloco.me") || "";
} catch { /* storage is off: then it is not remembered */ }
find.addEventListener("input", () => {
  try {
    localStorage.setItem("p2pdiloco.me", find.value.trim());
  } catch { /* as above */ }
  mark();
});

mark();
offerCopy();
setInterval(age, 1000);
connect();
