// Slides: one section at a time; keys, the presenter's notes, and text as large as the screen allows.
const slides = [...document.querySelectorAll('.slide')];
const clamp = n => Math.min(Math.max(n, 0), slides.length - 1);
let at = 0;
// Larger while there is room, smaller while there is too much, never so small that the last row cannot read it.
function fit(slide) {
  const body = slide.querySelector('.body'), inner = slide.querySelector('.fit');
  if (slide.classList.contains('figure')) return;
  for (let tenths = 15; tenths >= 6; tenths--) {
    inner.style.zoom = tenths / 10;
    if (body.scrollHeight <= body.clientHeight + 1 && inner.scrollWidth <= inner.clientWidth + 1) return;
  }
}
function show(n) {
  at = clamp(n);
  slides.forEach((s, i) => s.classList.toggle('now', i === at));
  document.getElementById('number').textContent = (at + 1) + ' / ' + slides.length;
  fit(slides[at]);
  history.replaceState(null, '', '#' + (at + 1));
}
function notes() { document.body.classList.toggle('shownotes'); fit(slides[at]); }
function full() { document.fullscreenElement ? document.exitFullscreen() : document.documentElement.requestFullscreen(); }
const keys = {
  ArrowRight: () => show(at + 1), ArrowDown: () => show(at + 1), PageDown: () => show(at + 1), ' ': () => show(at + 1),
  ArrowLeft: () => show(at - 1), ArrowUp: () => show(at - 1), PageUp: () => show(at - 1),
  Home: () => show(0), End: () => show(slides.length - 1), n: notes, N: notes, f: full,
};
document.addEventListener('keydown', e => {
  if (e.ctrlKey || e.metaKey || e.altKey || !(e.key in keys) || e.target.matches('summary, button, a') && e.key === ' ') return;
  e.preventDefault();
  keys[e.key]();
});
document.getElementById('back').onclick = () => show(at - 1);
document.getElementById('on').onclick = () => show(at + 1);
addEventListener('resize', () => fit(slides[at]));
addEventListener('hashchange', () => show(parseInt(location.hash.slice(1) || '1') - 1));
document.querySelectorAll('.slide details').forEach(d => d.addEventListener('toggle', () => fit(slides[at])));
document.body.classList.add('live');
show(parseInt(location.hash.slice(1) || '1') - 1);
