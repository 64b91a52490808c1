// Runs in every document before its own scripts, and detects when the page has settled. It keeps
// the real timers, even if the page replaces them.
(() => {
  if (window.__ls) return;
  const setTimer = window.setTimeout.bind(window);
  const now = performance.now.bind(performance);
  const state = { pending: 0, leaving: false, opened: 0, targets: [] };

  const tick = (ms) => new Promise((resolve) => setTimer(resolve, ms));

  // An open fetch or XMLHttpRequest keeps the page busy until its answer has been read. An endless
  // answer keeps it busy for one second only.
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
  // A navigation to another document also keeps it busy: this document must not be read any more.
  if (window.navigation) {
    navigation.addEventListener('navigate', (event) => {
      if (!event.destination.sameDocument && event.downloadRequest === null) {
        // A later handler may still cancel the navigation.
        setTimer(() => { if (!event.defaultPrevented) state.leaving = true; }, 0);
      }
    });
    navigation.addEventListener('navigateerror', () => { state.leaving = false; });
  }
  // Tabs that are about to open. The next snapshot reports their number.
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
  // Elements with click listeners, and fields with key listeners.
  const clickable = new WeakSet();
  const keyed = new WeakSet();
  const addListener = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if ((type === 'click' || type === 'mousedown') && this instanceof Element) clickable.add(this);
    if (type === 'keydown' && this instanceof HTMLInputElement) keyed.add(this);
    return addListener.call(this, type, ...rest);
  };
  const frame = window.requestAnimationFrame.bind(window);

  // Images in styles give elements their size, and no event reports their loading. They are loaded
  // early and kept, so that an image shown only under the mouse has its size at once. While it
  // loads, its element would have no size, and a click would miss it.
  const drawn = new Map();
  function load(url) {
    if (!url || drawn.has(url)) return [];
    const image = new Image();
    image.src = url;
    drawn.set(url, image);
    return [image.decode().catch(() => {})];
  }

  // Loads the images of all rules, including rules without a match yet (`:hover`). Style sheets
  // of other sites are unreadable.
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
    // A form is submitted in a separate task after the click.
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
