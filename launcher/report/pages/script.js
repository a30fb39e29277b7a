// Zooms the timelines: the canvas gets wider, and its place is scrolled by the browser.
(() => {
  const scroll = document.querySelector(".scroll");
  if (!scroll) return;
  const canvas = scroll.querySelector(".canvas");
  let zoom = 1;
  const label = () => {
    for (const text of canvas.querySelectorAll("text")) {
      const width = (Number(text.dataset.width) / 100) * canvas.clientWidth;
      text.style.display = width > 7 * text.textContent.length + 3 ? "" : "none";
    }
    for (const mark of canvas.querySelectorAll(".ruler span")) mark.style.display = "";
    let until = -Infinity;
    for (const mark of canvas.querySelectorAll(".ruler span")) {
      const at = mark.offsetLeft;
      if (at < until || at + mark.offsetWidth > canvas.clientWidth) mark.style.display = "none";
      else until = at + mark.offsetWidth + 8;
    }
  };
  const set = (wanted, at) => {
    const next = Math.min(Math.max(wanted, 1), 400);
    const middle = (scroll.scrollLeft + at) / canvas.clientWidth;
    zoom = next;
    canvas.style.width = `${100 * zoom}%`;
    scroll.scrollLeft = middle * canvas.clientWidth - at;
    label();
  };
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () =>
      set(zoom * Number(button.dataset.zoom), scroll.clientWidth / 2));
  scroll.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    set(zoom * Math.exp(-event.deltaY / 300), event.clientX - scroll.getBoundingClientRect().left);
  }, { passive: false });
  scroll.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "-")
      set(zoom * (event.key === "+" ? 2 : 0.5), scroll.clientWidth / 2);
  });
  addEventListener("resize", label);
  label();
})();
