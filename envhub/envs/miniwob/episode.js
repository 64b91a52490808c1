// Starts an episode of a MiniWoB page and reports its state.
(() => {
  const NO_LIMIT_MS = 1e12;

  const words = (el) => el.textContent.replace(/\s+/g, ' ').trim();

  // The goal as text. A colour or an icon without words is named, unless the page already names it.
  function wording(query) {
    const told = core.getUtterance();
    if (typeof told !== 'string') return told.utterance;
    if (told !== words(query)) return told;
    const copy = query.cloneNode(true);
    for (const el of copy.querySelectorAll('*')) {
      const sign = el.style.backgroundColor || (el.className || '').split(' ').pop();
      if (!el.textContent && sign) el.textContent = `[${sign}]`;
    }
    return words(copy);
  }

  window.__lsState = () => {
    if (typeof core === 'undefined' || !core.getUtterance) return null;
    const query = document.getElementById('query');
    return {
      goal: query ? wording(query) : '', isDone: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL,
    };
  };

  const REPAIRS = {
    // With wide fonts the hours move below their labels, and a new event does not appear under the
    // mouse.
    'daily-calendar': () => {
      document.head.appendChild(document.createElement('style'))
        .textContent = '.hour { white-space: nowrap; }';
    },
    // The first slice is selected at the start. A selected slice is removed and inserted again at
    // each mouse event over it, so that no click would ever reach it.
    'click-pie-nodelay': () => {
      const { createWheel } = wheelnav.prototype;
      wheelnav.prototype.createWheel = function (...titles) {
        createWheel.apply(this, titles);
        this.navItems[0].selected = false;
        return this;
      };
    },
    // The page searches an ending from the left: by its test, `bash.sh` does not end with `sh`.
    terminal: () => {
      const fault = '(fileInput.indexOf(expectedDel) + expectedDel.length) === fileInput.length';
      const source = String(removeContents)
        .replace(fault, "expectedDel !== '' && fileInput.endsWith(`.${expectedDel}`)");
      window.removeContents = window.eval(`(${source})`);
    },
  };

  window.__lsStart = (seed) => {
    REPAIRS[location.pathname.match(/([^/]+)\.html$/)[1]]?.();
    core.EPISODE_MAX_TIME = NO_LIMIT_MS;
    if (window.jQuery) jQuery.fx.off = true;
    window.__lsSeed = seed;
    Math.seedrandom(seed);
    core.startEpisodeReal();
  };

  // Runs a call with the episode's random numbers from their start. The page's generator is kept.
  window.__lsTwin = (call) => {
    const own = Math.random;
    Math.seedrandom(window.__lsSeed);
    try { return call(); } finally { Math.random = own; }
  };

  // A canvas does not store its lines. Here the corners of the last line are recorded.
  window.__lsDrawn = new WeakMap();
  const brush = CanvasRenderingContext2D.prototype;
  const { beginPath, moveTo, lineTo } = brush;
  function keep(context, x, y) {
    const { a, b, c, d, e, f } = context.getTransform();
    window.__lsDrawn.get(context.canvas)?.push([a * x + c * y + e, b * x + d * y + f]);
  }
  brush.beginPath = function () {
    window.__lsDrawn.set(this.canvas, []);
    beginPath.call(this);
  };
  brush.moveTo = function (x, y) { keep(this, x, y); moveTo.call(this, x, y); };
  brush.lineTo = function (x, y) { keep(this, x, y); lineTo.call(this, x, y); };
})();
