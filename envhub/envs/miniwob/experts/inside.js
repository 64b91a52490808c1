// State of the pages' scripts for the experts. Each function is called on its own page.
({
  circles: () => Array.from(document.querySelectorAll('circle'), (c) =>
    [c.getAttribute('fill'), c.cx.baseVal.value, c.cy.baseVal.value]),

  sliders: () => $('.ui-slider').toArray().map((el) =>
    ['min', 'max', 'value'].map((name) => $(el).slider('option', name))),

  namedColour: () => ui_utils.colorNameToHex(/Select (\w+) /.exec(core.getUtterance())[1]),

  // Every word of the editor, with its left and right end and its vertical middle.
  words: () => {
    const node = document.querySelector('.ql-editor p').firstChild;
    let at = 0;
    if (!node || node.nodeType !== Node.TEXT_NODE) return [];
    return node.data.split(' ').map((word) => {
      const range = document.createRange();
      range.setStart(node, at);
      range.setEnd(node, at + word.length);
      at += word.length + 1;
      const box = range.getClientRects()[0];
      return [word, box.left, box.right, (box.top + box.bottom) / 2];
    });
  },

  synonyms: () => SYNONYMS,

  icons: () => PROBLEM_SET,

  freeHours: () => {
    const boxes = Array.from(document.querySelectorAll('.event'), (el) => el.getBoundingClientRect());
    return Array.from(document.querySelectorAll('.half-hour')).filter((el) => {
      const own = el.getBoundingClientRect();
      const at = (own.top + own.bottom) / 2;
      return !boxes.some((box) => box.top < at && at < box.bottom);
    }).map((el) => Number(el.id.slice(3)));
  },

  cube: () => {
    const {positionX, positionY, torqueX, torqueY} = cube.viewport;
    const side = +document.querySelector('.active').textContent;
    return {x: positionX, y: positionY, spin_x: torqueX, spin_y: torqueY, side};
  },

  // The requested action, and the email that it applies to.
  ordered: () => {
    const {data} = $._data($('.email-thread')[0], 'events').click[0];
    const {expectedDetails: {action, email, reply, forward}, emails} = data;
    return {action, place: emails.indexOf(email), reply: reply || '', forward: forward || ''};
  },

  // The sequence of flashes, drawn from the same random numbers as in the page.
  flashes: () => __lsTwin(() => Array.from({length: Math.floor(Math.random() * 3) + 3},
    () => Math.floor(Math.random() * 4) + 1)),

  // The shortest winning moves from the current board; the opponent's random numbers are known.
  winningMoves: () => {
    const kept = [gameState, freeSpaces], board = gameState.join();
    const play = (moves) => __lsTwin(() => {
      gameState = INITIAL_GAME_STATE.slice();
      freeSpaces = EMPTY_SPACES.slice();
      const put = (at, mark) => {
        gameState[at] = mark;
        freeSpaces.splice(freeSpaces.indexOf(at), 1);
      };
      const answer = () => {
        let at = core.randi(0, 100) < RANDOM_CHANCE || freeSpaces.length === 9
          ? core.sample(freeSpaces) : determineSpace(-1, 1);
        if (at === undefined || at === false) at = core.sample(freeSpaces);
        put(at, -1);
      };
      if (core.randi(0, 100) > 50) answer();
      for (const at of moves) {
        put(at, 1);
        if (checkWinner(1)) return 'won';
        if (freeSpaces.length === 0) return 'over';
        answer();
        if (checkWinner(-1) || freeSpaces.length === 0) return 'over';
      }
      return gameState.join();
    });
    const numMade = kept[0].filter((mark) => mark === 1).length;
    let games = [[]], found = null;
    for (let depth = 0; games.length && found === null; depth += 1) {
      const longer = [];
      for (const moves of games) {
        const end = play(moves);
        if (end === 'won') { found = moves.slice(numMade); break; }
        if (end === 'over' || (depth === numMade && end !== board)) continue;
        end.split(',').forEach((mark, at) => { if (mark === '0') longer.push([...moves, at]); });
      }
      games = longer;
    }
    [gameState, freeSpaces] = kept;
    return found;
  },
})
