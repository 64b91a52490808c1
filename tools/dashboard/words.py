"""Texts about a run for displays and logs: one status line, or its parts."""

from common.text import plain
from tools.dashboard.run_view import LEDGER_KEYS, RunView

ENGINES_SHOWN = 3
A_CHECKPOINT = "disk: a checkpoint"
_SPARKS = "▁▂▃▄▅▆▇█"


def status_line(view: RunView) -> str:
    """Return the run in one line; unknown parts are left out."""
    status = view.status
    done = f" {status.num_done}/{status.num_total}" if status.num_total else ""
    done += if_known(" ({} left)", left_text(view))
    parts = [
        "" if status.phase == "train" else f"{view.phase}{done},",
        f"step {view.step}/{view.num_steps}",
        if_known("success {:.2f}", view.success),
        if_known("group reward {:.2f}", view.group_reward),
        horizon_text(view),
        if_known("lag {:.1f}", view.lag_mean),
        if_known("actor {:.0f} tok/s", view.actor_tokens_per_s),
        if_known("learner {:.0f} tok/s", status.learner.tokens_per_s),
        groups_text(view),
        times(view, " "),
    ]
    waits = waits_text(view)
    silence = silence_text(view)
    ends = [
        starting_text(view.starting, view.usual_s),
        stopping_text(view),
        waits,
        silence and f"scheduler {silence}",
        status.notice,
    ]
    return plain("; ".join(filter(None, [" ".join(filter(None, parts)), *ends])))


def if_known(form: str, value: float | str | None) -> str:
    """Return a value in a format such as "lag {:.1f}"; "" if it is unknown."""
    return "" if value is None else form.format(value)


def left_text(view: RunView) -> str | None:
    """Return the remaining time of an evaluation; None if there is none, or it is unknown."""
    is_known = view.status.phase != "train" and view.phase_left_s is not None
    return duration(view.phase_left_s) if is_known else None


def starting_text(starting: dict[str, float], usual_s: dict[str, float]) -> str:
    """Return the starting roles with elapsed and usual times, such as "(34s of about 45s)"."""

    def so_far(name: str) -> str:
        """Return the elapsed time of a starting role, and its usual time if known."""
        since_s = starting[name]
        whole_s = usual_s.get(name)
        return duration(since_s) + if_known(" of about {}", whole_s and duration(whole_s))

    texts = [
        f"{name} is starting ({so_far(name)})" for name in starting if not name.startswith("actor")
    ]
    engines = {name: since_s for name, since_s in starting.items() if name.startswith("actor")}
    oldest = so_far(max(engines, key=lambda name: engines[name])) if engines else ""
    if len(engines) > ENGINES_SHOWN:
        texts.append(f"{len(engines)} engines are starting ({oldest})")
    elif len(engines) == 1:
        texts.append(f"engine is starting ({oldest})")
    elif engines:
        texts.append(f"engines of {', '.join(engines)} are starting ({oldest})")
    return ", ".join(texts)


def stopping_text(view: RunView) -> str:
    """Return the remaining time of a stop and how to skip it; "" if no stop is in progress."""
    if view.stop_in_s is None:
        return ""
    left = duration(view.stop_in_s)
    return f"stopping: the learner may take {left} to save; a second Ctrl-C ends it at once"


def times(view: RunView, gap: str) -> str:
    """Return the elapsed time and the remaining time."""
    elapsed = "" if view.elapsed_s is None else f"elapsed {duration(view.elapsed_s)}"
    eta = f"eta {duration(view.eta_s)}" if view.eta_s else ""
    return gap.join(filter(None, [elapsed, eta]))


def ledger_line(ledger: dict[str, int]) -> str:
    """Return the ledger as an equation: issued = trained + ... + in flight; "" if unknown."""
    if "issued" not in ledger:
        return ""
    terms = [f"{k.replace('_', ' ')} {ledger[k]}" for k in LEDGER_KEYS if k in ledger]
    lost = f"   lost {ledger['lost']}" if "lost" in ledger else ""
    return f"issued {ledger['issued']} = {' + '.join(terms)}{lost}"


def sparkline(values: list[float]) -> str:
    """Return one block character per value; values lie between 0 and 1."""
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(min(1.0, max(0.0, value)) * last)] for value in values)


def horizon_text(view: RunView) -> str:
    """Return a text like "horizon 10 (stage 2/3)", with the distance bound; "" if unknown."""
    status = view.status
    of = "" if status.stage is None else f" (stage {status.stage + 1}/{view.num_stages})"
    unit = "" if status.unit == "turns" else f" {status.unit}"
    far = if_known(", distance {:.0f}", status.distance)
    far += if_known(" (stage {})", None if not far else (status.distance_stage or 0) + 1)
    return "" if status.horizon is None else f"horizon {status.horizon:.0f}{unit}{of}{far}"


def groups_text(view: RunView) -> str:
    """Return a text like "groups 18 open 3 ready"; "" if unknown."""
    opened = if_known(" {} open", view.status.num_open)
    ready = if_known(" {} ready", view.status.num_ready)
    return f"groups{opened}{ready}" if opened or ready else ""


def waits_text(view: RunView) -> str:
    """Return the waiting roles, each with the cause of its wait."""
    waits = [f"{r.name} waits for {r.waiting_for}" for r in view.roles if r.waiting_for]
    if view.checkpoint_s:
        took = f"{A_CHECKPOINT}, which takes about {duration(view.checkpoint_s)}"
        waits = [each.replace(A_CHECKPOINT, took) for each in waits]
    for what in sorted({*view.unplaced.values()}):
        names = [name for name, needed in view.unplaced.items() if needed == what]
        who = ", ".join(names) if len(names) <= ENGINES_SHOWN else f"{len(names)} roles"
        waits.append(f"{who} {'wait' if len(names) > 1 else 'waits'} for {what}")
    return ", ".join(waits)


def silence_text(view: RunView) -> str:
    """Return how long the scheduler has been silent; "" if it is not."""
    return f"silent for {duration(view.silent_s)}" if view.is_silent else ""


def duration(seconds: float | None) -> str:
    """Return a duration as text, such as "34s", "2m05s" or "1h02m"."""
    whole = round(seconds or 0.0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
