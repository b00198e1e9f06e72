// Names and keyboard access for what the theme's own script makes: copy buttons of code, tables and outputs that scroll.
function mend() {
  document.querySelector(".md-search:not([aria-label])")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav, i) => nav.setAttribute("aria-label", `Code ${nav.parentElement.id || i}`));
  document.querySelectorAll(".md-typeset__scrollwrap, .shown").forEach(box => box.scrollWidth > box.clientWidth && (box.tabIndex = 0));
}
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
mend();
