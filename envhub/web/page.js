// Reads the page as a list of accessible nodes. Loaded after settle.js.
(() => {
  if (window.__ls.snapshot) return;
  const { state, settle, styledImages, clickable } = window.__ls;
  const ROLE_BY_TAG = {
    BUTTON: 'button', TEXTAREA: 'textbox', OPTION: 'option', OPTGROUP: 'group', H1: 'heading',
    H2: 'heading', H3: 'heading', H4: 'heading', H5: 'heading', H6: 'heading', IMG: 'img',
    TABLE: 'table', TR: 'row', TD: 'cell', TH: 'columnheader', UL: 'list', OL: 'list',
    LI: 'listitem', NAV: 'navigation', MAIN: 'main', DIALOG: 'dialog', SUMMARY: 'button',
    PROGRESS: 'progressbar', METER: 'meter', IFRAME: 'Iframe', LABEL: 'LabelText',
    ARTICLE: 'article', ASIDE: 'complementary', FOOTER: 'contentinfo', HEADER: 'banner',
    FIELDSET: 'group', HR: 'separator',
  };
  const ROLE_BY_INPUT = {
    button: 'button', submit: 'button', reset: 'button', image: 'button', file: 'button',
    checkbox: 'checkbox', radio: 'radio', range: 'slider', number: 'spinbutton',
    search: 'searchbox', color: 'ColorWell', date: 'Date', time: 'InputTime',
    'datetime-local': 'DateTime', month: 'Date', week: 'Date',
  };
  const NAMED_BY_CONTENT = new Set(['link', 'button', 'heading', 'option', 'cell', 'columnheader',
    'rowheader', 'tab', 'menuitem', 'menuitemcheckbox', 'menuitemradio', 'treeitem', 'switch',
    'checkbox', 'radio', 'tooltip', 'clickable', 'gridcell', 'LabelText', 'alert', 'status']);
  const INTERACTIVE = new Set(['link', 'button', 'textbox', 'searchbox', 'combobox', 'listbox',
    'option', 'checkbox', 'radio', 'slider', 'spinbutton', 'tab', 'menuitem', 'switch', 'treeitem',
    'menuitemcheckbox', 'menuitemradio', 'ColorWell', 'Date', 'InputTime', 'DateTime',
    'clickable']);
  const SKIPPED = new Set(['SCRIPT', 'STYLE', 'NOSCRIPT', 'TEMPLATE', 'HEAD', 'META', 'LINK', 'BR']);
  const SHAPES = new Set(['circle', 'rect', 'polygon', 'path', 'ellipse', 'line', 'text']);
  const squeeze = (text) => text.replace(/\s+/g, ' ').trim();

  function roleOf(el) {
    const given = el.getAttribute('role');
    if (given === 'presentation' || given === 'none') return '';
    if (given) return given.split(' ')[0];
    if (el.tagName === 'INPUT') return ROLE_BY_INPUT[el.type] || 'textbox';
    if (el.tagName === 'SELECT') return el.multiple || el.size > 1 ? 'listbox' : 'combobox';
    if (el.tagName === 'A') return el.hasAttribute('href') ? 'link' : '';
    if (el.isContentEditable && !el.parentElement?.isContentEditable) return 'textbox';
    return ROLE_BY_TAG[el.tagName] || '';
  }

  function isHidden(el, style) {
    return style.display === 'none' || style.visibility === 'hidden'
      || el.getAttribute('aria-hidden') === 'true' || el.hidden;
  }

  function textOf(node, depth) {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (node.nodeType !== Node.ELEMENT_NODE || SKIPPED.has(node.tagName) || depth > 12) return '';
    if (node.tagName !== 'OPTION' && isHidden(node, getComputedStyle(node))) return '';
    if (node.tagName === 'SELECT' || node.tagName === 'TEXTAREA') return '';
    if (node.getAttribute('aria-label')) return ` ${node.getAttribute('aria-label')} `;
    if (node.tagName === 'IMG') return ` ${node.alt} `;
    const parts = Array.from(node.childNodes, (child) => textOf(child, depth + 1));
    const text = parts.join('');
    return getComputedStyle(node).display === 'inline' ? text : ` ${text} `;
  }

  function labelOf(el) {
    const labels = el.labels ? Array.from(el.labels, (label) => squeeze(textOf(label, 0))) : [];
    return labels.filter(Boolean).join(' ');
  }

  function nameOf(el, role) {
    const ids = el.getAttribute('aria-labelledby');
    if (ids) {
      const parts = ids.split(/\s+/).map((id) => document.getElementById(id)).filter(Boolean);
      const name = squeeze(parts.map((part) => textOf(part, 0)).join(' '));
      if (name) return name;
    }
    const label = el.getAttribute('aria-label');
    if (label) return squeeze(label);
    if (el.tagName === 'INPUT' && ['button', 'submit', 'reset'].includes(el.type)) {
      return squeeze(el.value || (el.type === 'submit' ? 'Submit' : ''));
    }
    if (el.tagName === 'IMG' || el.type === 'image') return squeeze(el.alt || el.title || '');
    if ('labels' in el && el.tagName !== 'BUTTON') {
      const words = labelOf(el) || el.placeholder || el.title || '';
      if (words || el.tagName !== 'BUTTON') return squeeze(words);
    }
    if (el.tagName === 'OPTGROUP') return squeeze(el.label);
    if (NAMED_BY_CONTENT.has(role)) return squeeze(textOf(el, 0)) || squeeze(el.title || '');
    return squeeze(el.getAttribute('title') || '');
  }

  // The beginning of a text. A surrogate pair is never split.
  const cut = (text, most) => (text.length > most
    ? text.slice(0, most).replace(/[\ud800-\udbff]$/, '') : text);

  function propertiesOf(el, role, isFocused, maxChars) {
    const list = [];
    const say = (word, value) => list.push(`${word}: ${value}`);
    const aria = (word) => el.getAttribute(`aria-${word}`);
    const isToggle = el.type === 'checkbox' || el.type === 'radio';
    if (role === 'combobox' && el.tagName === 'SELECT') {
      say('value', JSON.stringify(squeeze(el.selectedOptions[0]?.text || '')));
    } else if (typeof el.value === 'string' && INTERACTIVE.has(role) && !isToggle
        && !['BUTTON', 'OPTION', 'LI', 'SELECT'].includes(el.tagName) && role !== 'button') {
      if (el.value) say('value', JSON.stringify(cut(el.value, maxChars)));
    }
    if (isFocused) say('focused', 'True');
    if (isToggle) say('checked', el.checked ? 'true' : 'false');
    else if (aria('checked')) say('checked', aria('checked'));
    if (el.tagName === 'OPTION') { if (el.selected) say('selected', 'True'); }
    else if (aria('selected') === 'true') say('selected', 'True');
    if (el.tagName === 'SUMMARY') say('expanded', el.parentElement.open ? 'True' : 'False');
    else if (aria('expanded')) say('expanded', aria('expanded') === 'true' ? 'True' : 'False');
    if (el.disabled || aria('disabled') === 'true') say('disabled', 'True');
    if (el.required) say('required', 'True');
    if (aria('haspopup') && aria('haspopup') !== 'false') say('hasPopup', aria('haspopup'));
    return list.join(' ');
  }

  // Listeners count only with `deep`: applications often listen at the root for all their elements.
  function listens(el, isDeep) {
    return Boolean(el.onclick) || el.hasAttribute('onclick') || el.tabIndex >= 0
      || (isDeep && clickable.has(el));
  }

  const hintsOf = (el) => [el.id || '', String(el.getAttribute('class') || '')];

  // The number of a text node's block: the texts of one block form a sentence.
  function blockOf(node, blocks) {
    let el = node.parentElement;
    while (el !== document.body && getComputedStyle(el).display === 'inline') el = el.parentElement;
    if (!blocks.has(el)) blocks.set(el, blocks.size);
    return blocks.get(el);
  }

  const placeOf = (rect) => `at: (${Math.round(rect.left)},${Math.round(rect.top)}) `
    + `size: ${Math.round(rect.width)}x${Math.round(rect.height)}`;

  function reader(options) {
    const rows = [];
    const blocks = new Map();
    state.targets = [];
    const focused = document.activeElement;
    const add = (target, row, rect) => {
      if (options.places && !row[4].includes('at: (')) row[4] = `${row[4]} ${placeOf(rect)}`.trim();
      state.targets.push(target);
      const seen = rect.right > 0 && rect.bottom > 0 && rect.left < innerWidth
        && rect.top < innerHeight;
      rows.push([...row, Math.round(rect.left + scrollX), Math.round(rect.top + scrollY),
        Math.round(rect.width), Math.round(rect.height), seen ? 1 : 0]);
      return rows.length - 1;
    };
    // An empty coloured box.
    const isBox = (el, style) => (el.tagName === 'SPAN' || el.tagName === 'DIV')
      && el.childNodes.length === 0 && style.borderTopStyle === 'solid'
      && !['rgba(0, 0, 0, 0)', 'transparent'].includes(style.backgroundColor);
    function text(node, parent, depth) {
      const words = squeeze(node.data);
      if (!words) return;
      const range = document.createRange();
      range.selectNodeContents(node);
      const rect = range.getBoundingClientRect();
      if (rect.width === 0 || rect.height === 0) return;
      add(node, [parent, depth, 'StaticText', words, '', ...hintsOf(node.parentElement),
        blockOf(node, blocks)], rect);
    }
    function shape(el, parent, depth) {
      const rect = el.getBoundingClientRect();
      if (el.tagName === 'g' || el.tagName === 'svg' || rect.width + rect.height === 0) return;
      const style = getComputedStyle(el);
      const facts = [placeOf(rect)];
      if (style.fill !== 'none') facts.unshift(`fill: ${el.getAttribute('fill') || style.fill}`);
      if (el.tagName === 'polygon') facts.push(`points: ${el.getAttribute('points')}`);
      const name = el.tagName === 'text' ? squeeze(el.textContent) : '';
      add(el, [parent, depth, el.tagName, name, facts.join(' '), ...hintsOf(el), -1], rect);
    }
    // The last line drawn on a canvas, in pixels of the page.
    function canvas(el, parent, depth) {
      const rect = el.getBoundingClientRect();
      const drawn = window.__lsDrawn?.get(el) || [];
      const points = drawn.map(([x, y]) => `${Math.round(x + rect.left)},${Math.round(y + rect.top)}`);
      const facts = points.length ? `${placeOf(rect)} points: ${points.join(' ')}` : placeOf(rect);
      add(el, [parent, depth, 'canvas', '', facts, ...hintsOf(el), -1], rect);
    }
    function walk(node, parent, depth) {
      if (node.nodeType === Node.TEXT_NODE) return text(node, parent, depth);
      if (node.nodeType !== Node.ELEMENT_NODE || SKIPPED.has(node.tagName)) return undefined;
      if (options.skip.length && node.id && options.skip.includes(node.id)) return undefined;
      if (options.deep && SHAPES.has(node.tagName)) return shape(node, parent, depth);
      if (options.deep && node.tagName === 'CANVAS') return canvas(node, parent, depth);
      const style = getComputedStyle(node);
      if (node.tagName !== 'OPTION' && (style.display === 'none'
          || (!options.deep && node.getAttribute('aria-hidden') === 'true'))) return undefined;
      let role = style.visibility === 'hidden' ? '' : roleOf(node);
      // A list item or cell with a click listener is clickable.
      if (options.deep && ['listitem', 'cell'].includes(role) && clickable.has(node)) role = '';
      if (role === '' && style.visibility !== 'hidden' && style.display !== 'contents') {
        const pointed = style.cursor === 'pointer'
          && getComputedStyle(node.parentElement || node).cursor !== 'pointer';
        if (node !== document.body && (pointed || listens(node, options.deep))) role = 'clickable';
        else if (options.deep && isBox(node, style)) role = 'box';
      }
      const hasOwnRow = role !== '';
      let at = parent;
      if (hasOwnRow) {
        const shownBy = node.tagName === 'OPTION' || node.tagName === 'OPTGROUP'
          ? node.closest('select') || node : node;
        const own = node.getBoundingClientRect();
        const rect = own.width > 0 ? own : shownBy.getBoundingClientRect();
        const isVoid = rect.width === 0 || rect.height === 0;
        if (!isVoid || INTERACTIVE.has(role) === false) {
          let name = cut(nameOf(node, role), 400);
          let states = propertiesOf(node, role, node === focused, options.deep ? 4000 : 400);
          if (options.deep && !name && ['clickable', 'button'].includes(role)) name = hintsOf(node).join(' ').trim();
          const colour = options.deep ? node.style.backgroundColor : '';
          if (colour) states = `${states} color: ${colour}`.trim();
          at = add(node, [parent, depth, role, name, states, ...hintsOf(node), -1], rect);
          depth += 1;
        }
      }
      if (node.tagName === 'TEXTAREA' || node.tagName === 'IMG') return undefined;
      if (node.tagName === 'SELECT' && options.closedSelects) return undefined;
      if (node.shadowRoot) for (const child of node.shadowRoot.childNodes) walk(child, at, depth);
      for (const child of node.childNodes) walk(child, at, depth);
      return undefined;
    }
    for (const child of document.body ? document.body.childNodes : []) walk(child, -1, 0);
    return rows;
  }

  async function snapshot(options) {
    await settle(options.maxMs, options.quietMs);
    if (window.__lsClock && options.advanceMs > 0) await window.__lsClock.advance(options.advanceMs);
    if (options.deep) await styledImages();
    const opened = state.opened;
    state.opened = 0;
    return JSON.stringify({
      url: location.href, title: document.title, rows: reader(options), opened,
      state: window.__lsState ? window.__lsState() : null,
      isLeaving: state.leaving || document.readyState === 'loading',
    });
  }

  window.__ls.snapshot = snapshot;
})();
