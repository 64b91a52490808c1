// Runs in every document before its own scripts: says when the page has come to rest. It keeps
// real timers, whatever the page does to its own.
(() => {
  if (window.__ls) return;
  const setTimer = window.setTimeout.bind(window);
  const now = performance.now.bind(performance);
  const state = { pending: 0, leaving: false, opened: 0, targets: [] };

  const tick = (ms) => new Promise((resolve) => setTimer(resolve, ms));

  // A fetch or XMLHttpRequest under way keeps the page busy, until its answer has been read. Of an
  // answer that does not end only the first second is waited for.
  const MAX_BODY_MS = 1000;
  const pageFetch = window.fetch;
  const readToEnd = (response) => Promise.race([response.clone().arrayBuffer(), tick(MAX_BODY_MS)]);
  if (pageFetch) {
    window.fetch = function (...args) {
      state.pending += 1;
      const answer = pageFetch.apply(this, args);
      answer.then(readToEnd).catch(() => {}).then(() => tick(0))
        .then(() => { state.pending -= 1; });
      return answer;
    };
  }
  const send = XMLHttpRequest.prototype.send;
  XMLHttpRequest.prototype.send = function (...args) {
    state.pending += 1;
    this.addEventListener('loadend', () => { state.pending -= 1; }, { once: true });
    return send.apply(this, args);
  };
  // So does a navigation to another document: this one must not be read any more.
  if (window.navigation) {
    navigation.addEventListener('navigate', (event) => {
      if (!event.destination.sameDocument && event.downloadRequest === null) {
        // A handler that runs later may still refuse it.
        setTimer(() => { if (!event.defaultPrevented) state.leaving = true; }, 0);
      }
    });
    navigation.addEventListener('navigateerror', () => { state.leaving = false; });
  }
  // A tab that is about to open: whoever reads this page next wants to know.
  const openTab = window.open;
  window.open = function (...args) {
    const tab = openTab.apply(this, args);
    if (tab) state.opened += 1;
    return tab;
  };
  window.addEventListener('click', (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[href]') : null;
    if (link && link.target === '_blank' && !event.defaultPrevented) state.opened += 1;
  });
  // Who listens to clicks, and which fields to keys.
  const clickable = new WeakSet();
  const keyed = new WeakSet();
  const addListener = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if ((type === 'click' || type === 'mousedown') && this instanceof Element) clickable.add(this);
    if (type === 'keydown' && this instanceof HTMLInputElement) keyed.add(this);
    return addListener.call(this, type, ...rest);
  };
  const frame = window.requestAnimationFrame.bind(window);

  // Images that styles bring in give elements their size; a page says nothing of their loading. They
  // are held, so that one that only shows under the mouse has its size at once: while it loads the
  // element has none, and a click misses it.
  const drawn = new Map();
  function load(url) {
    if (!url || drawn.has(url)) return [];
    const image = new Image();
    image.src = url;
    drawn.set(url, image);
    return [image.decode().catch(() => {})];
  }

  // Of rules, too, that match nothing yet (`:hover`); sheets of other sites cannot be read.
  const read = new WeakSet();
  function imagesOfRules() {
    const waits = [];
    for (const sheet of document.styleSheets) {
      if (read.has(sheet)) continue;
      read.add(sheet);
      let rules = [];
      try { rules = Array.from(sheet.cssRules); } catch { continue; }
      for (const rule of rules) {
        for (const match of rule.cssText.matchAll(/url\("([^"]+)"\)/g)) {
          if (rule.selectorText) waits.push(...load(new URL(match[1], sheet.href || document.baseURI).href));
        }
      }
    }
    return waits;
  }

  async function styledImages() {
    const waits = imagesOfRules();
    for (const el of document.body ? document.body.querySelectorAll('*') : []) {
      const style = getComputedStyle(el);
      for (const value of [style.backgroundImage, style.content, style.listStyleImage]) {
        waits.push(...load(value.startsWith('url("') ? value.slice(5, value.indexOf('")')) : ''));
      }
    }
    await Promise.all(waits);
    if (waits.length) await tick(0);
  }

  async function settle(maxMs, quietMs) {
    const start = now();
    let changed = quietMs > 0 ? start : -Infinity;
    const watcher = new MutationObserver(() => { changed = now(); });
    if (quietMs > 0) watcher.observe(document, { subtree: true, childList: true });
    // Submitting a form is a task of its own, later than the click that caused it.
    await tick(0);
    await tick(0);
    await tick(0);
    const isBusy = () => state.leaving || state.pending > 0
      || document.readyState !== 'complete' || now() - changed < quietMs
      || Array.from(document.images).some((image) => !image.complete && image.loading !== 'lazy');
    while (isBusy() && now() - start < maxMs) await tick(4);
    watcher.disconnect();
  }

  Object.defineProperty(window, '__ls', {
    value: { state, settle, styledImages, clickable, keyed, frame }, enumerable: false,
  });
})();
