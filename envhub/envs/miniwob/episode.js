// Starts an episode of a MiniWoB page and tells how it stands.
(() => {
  const NO_LIMIT_MS = 1e12;
  window.__lsState = () => {
    if (typeof core === 'undefined' || !core.getUtterance) return null;
    const query = document.getElementById('query');
    const told = query ? core.getUtterance() : '';
    return {
      goal: typeof told === 'string' ? told : told.utterance,
      isDone: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL,
    };
  };
  window.__lsStart = (seed) => {
    core.EPISODE_MAX_TIME = NO_LIMIT_MS;
    if (window.jQuery) jQuery.fx.off = true;
    Math.seedrandom(seed);
    core.startEpisodeReal();
  };
})();
