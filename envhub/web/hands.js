// Points at, types into and scrolls the nodes of the last snapshot. Loaded after page.js.
(() => {
  if (window.__ls.aim) return;
  const { state, frame, keyed } = window.__ls;
  let mouse = { x: 0, y: 0 }; // last mouse position

  function boxOf(target) {
    if (target.nodeType === Node.TEXT_NODE) {
      const range = document.createRange();
      range.selectNodeContents(target);
      return range.getClientRects()[0] || range.getBoundingClientRect();
    }
    return target.getClientRects()[0] || target.getBoundingClientRect();
  }

  // A point of a box at which the element is not covered by another one; the middle is tried first.
  // Only a click also tries the outermost pixels: a drag from there would miss the element. They
  // are not tried on an SVG element: an unfilled frame is clicked in its middle, not on its line.
  const SHARES = [0.5, 0.3, 0.7, 0.1, 0.9];
  const WITH_EDGES = [...SHARES, 0, 1];
  const along = (start, length, share) => {
    if (share === 0) return Math.ceil(start);
    return share === 1 ? Math.ceil(start + length) - 1 : start + length * share;
  };
  function freePoint(el, box, isClick) {
    const shares = isClick && !(el instanceof SVGElement) ? WITH_EDGES : SHARES;
    for (const down of shares) {
      for (const across of shares) {
        const point = {
          x: along(box.left, box.width, across), y: along(box.top, box.height, down),
        };
        const isPlaced = point.x >= 0 && point.y >= 0 && point.x < innerWidth
          && point.y < innerHeight;
        const hit = isPlaced ? document.elementFromPoint(point.x, point.y) : null;
        if (hit !== null && el.contains(hit)) return point;
      }
    }
    return null;
  }

  // Scrolls a node of the last snapshot into view and returns a mouse position on it.
  function aim(index, isClick) {
    const target = state.targets[index];
    if (!target || !target.isConnected) return { is_gone: true };
    const el = target.nodeType === Node.TEXT_NODE ? target.parentElement : target;
    if (el.tagName === 'OPTION') return { is_option: true };
    let box = boxOf(target);
    let point = freePoint(el, box, isClick);
    if (point === null) {
      el.scrollIntoView({ block: 'center', inline: 'nearest', behavior: 'instant' });
      box = boxOf(target);
      point = freePoint(el, box, isClick)
        || { x: box.left + box.width / 2, y: box.top + box.height / 2 };
    }
    mouse = point;
    return point;
  }

  // While the button is held, each move advances the page's virtual clock, if it has one. The clock
  // advances first, because a listener of the page may stop the event.
  let moveMs = 0;
  window.addEventListener('mousemove', (event) => {
    const { clientX: x, clientY: y } = event;
    if (moveMs > 0 && (x !== mouse.x || y !== mouse.y)) window.__lsClock?.advance(moveMs);
    mouse = { x, y };
  }, true);
  async function hold(ms) {
    await window.__lsClock?.advance(Math.max(ms, moveMs));
    moveMs = ms;
  }

  // Scrolls the element under the mouse, or the page, by one screen.
  async function scroll(direction) {
    const canMove = (el) => el.scrollHeight > el.clientHeight + 1
      && ['auto', 'scroll'].includes(getComputedStyle(el).overflowY)
      && (direction > 0 ? el.scrollTop + el.clientHeight + 1 < el.scrollHeight : el.scrollTop > 0);
    let el = document.elementFromPoint(mouse.x, mouse.y);
    while (el && el !== document.body && el !== document.documentElement && !canMove(el)) {
      el = el.parentElement;
    }
    const isInner = el && el !== document.body && el !== document.documentElement;
    if (isInner) el.scrollBy({ top: direction * el.clientHeight, behavior: 'instant' });
    else scrollBy({ top: direction * innerHeight, behavior: 'instant' });
    // Pages receive the scroll event with the next frame.
    await new Promise((resolve) => { frame(() => frame(resolve)); });
  }

  function pick(index) {
    const option = state.targets[index];
    const select = option.closest('select');
    if (!select || option.disabled || select.disabled) return false;
    select.focus();
    if (select.multiple) option.selected = !option.selected;
    else select.value = option.value, option.selected = true;
    select.dispatchEvent(new Event('input', { bubbles: true }));
    select.dispatchEvent(new Event('change', { bubbles: true }));
    return true;
  }

  const SET_DIRECTLY = ['date', 'time', 'datetime-local', 'month', 'week', 'color', 'range'];

  // Focuses a field and selects its content, so that typing replaces it.
  function startTyping(index, words) {
    const el = state.targets[index];
    if (!el || !el.isConnected || el.nodeType === Node.TEXT_NODE) return 'gone';
    const isField = el.tagName === 'INPUT' || el.tagName === 'TEXTAREA';
    if (el.disabled || el.readOnly) return 'locked';
    if (!isField && !el.isContentEditable) return 'click';
    el.scrollIntoView({ block: 'nearest', behavior: 'instant' });
    el.focus();
    if (isField && SET_DIRECTLY.includes(el.type)) {
      const proto = HTMLInputElement.prototype;
      Object.getOwnPropertyDescriptor(proto, 'value').set.call(el, words);
      el.dispatchEvent(new Event('input', { bubbles: true }));
      el.dispatchEvent(new Event('change', { bubbles: true }));
      return 'set';
    }
    if (isField && ['checkbox', 'radio', 'button', 'submit', 'file'].includes(el.type)) return 'locked';
    if (isField) el.select();
    else getSelection().selectAllChildren(el);
    return keyed.has(el) && /^[^\n\r\t]+$/.test(words) ? 'keys' : 'type';
  }

  Object.assign(window.__ls, { aim, hold, pick, scroll, startTyping });
})();
