"""Experts of the pages that a look at what chance has in store decides."""

from envhub.envs.miniwob.pages import SHORT_STEPS_MS
from envhub.envs.miniwob.view import PageView, click
from envhub.web.actions import Kind

# The sequence of flashes, as the page drew it from the same chance.
FLASHES = (
    "__lsTwin(() => Array.from({length: Math.floor(Math.random() * 3) + 3}, "
    "() => Math.floor(Math.random() * 4) + 1))"
)
FLASH_EVERY_MS = 600
# The fewest moves that win from the board as it stands; the opponent's chance is known.
WINNING_MOVES = """(() => {
  const kept = [gameState, freeSpaces], board = gameState.join();
  const play = moves => __lsTwin(() => {
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
  const numMade = kept[0].filter(mark => mark === 1).length;
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
})()"""


def flashes(page: PageView) -> str | None:
    """Looks on until all buttons have flashed, then pushes them in that order."""
    clicks = sum(action.kind is Kind.CLICK for action in page.taken)
    num_looks = len(page.inside) * FLASH_EVERY_MS / SHORT_STEPS_MS["simon-says"]
    buttons = page.all("button")
    if len(page.taken) + 1 < num_looks:
        return f"hover [{buttons[0].id}]"
    return click(buttons[page.inside[clicks] - 1])


def three_in_a_row(page: PageView) -> str | None:
    """Makes the first of the moves that win."""
    if not page.inside:
        return None
    return click(page.one("clickable", dom_id=f"ttt-{page.inside[0]}"))
