// Replaces a page's clock by a virtual clock that moves only in `advance`. Waiting, animation and
// time measurement in pages then do not depend on the machine's speed. Random numbers are seeded.
(() => {
  if (window.__lsClock) return;
  const RealDate = Date;
  const START_MS = RealDate.UTC(2024, 0, 15, 9, 0, 0);
  const FRAME_MS = 16;
  const MAX_CALLS = 20000;
  let nowMs = 0;
  let nextId = 1;
  const timers = new Map();

  let chance = 12345;
  Math.random = () => {
    chance = (Math.imul(chance, 1664525) + 1013904223) >>> 0;
    return chance / 4294967296;
  };

  const schedule = (call, delay, args, every) => {
    const id = nextId++;
    const wait = Math.max(0, Number(delay) || 0);
    timers.set(id, { call, args, due: nowMs + wait, every: every ? Math.max(1, wait) : 0, id });
    return id;
  };
  window.setTimeout = (call, delay, ...args) => schedule(call, delay, args, false);
  window.setInterval = (call, delay, ...args) => schedule(call, delay, args, true);
  window.clearTimeout = window.clearInterval = (id) => { timers.delete(id); };
  window.requestAnimationFrame = (call) => schedule(() => call(nowMs), FRAME_MS, [], false);
  window.cancelAnimationFrame = window.clearTimeout;
  performance.now = () => nowMs;
  class VirtualDate extends RealDate {
    constructor(...args) { super(...(args.length ? args : [START_MS + nowMs])); }
    static now() { return START_MS + nowMs; }
  }
  window.Date = VirtualDate;

  function due(until) {
    let first = null;
    for (const timer of timers.values()) {
      if (timer.due <= until && (first === null || timer.due < first.due)) first = timer;
    }
    return first;
  }

  async function advance(ms) {
    const until = nowMs + ms;
    for (let calls = 0; calls < MAX_CALLS; calls += 1) {
      const timer = due(until);
      if (timer === null) break;
      nowMs = Math.max(nowMs, timer.due);
      if (timer.every) timer.due = nowMs + timer.every;
      else timers.delete(timer.id);
      try {
        if (typeof timer.call === 'function') timer.call(...timer.args);
      } catch (error) {
        console.error(error);
      }
      await null;
    }
    nowMs = until;
  }
  Object.defineProperty(window, '__lsClock', { value: { advance }, enumerable: false });
})();
