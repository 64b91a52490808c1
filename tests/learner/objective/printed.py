"""An evaluation of the printed objective in float64: it reads the line, and nothing else."""
# pyright: basic, reportOptionalSubscript=false, reportArgumentType=false, reportAssignmentType=false

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.wire.messages import Trajectory
from learner.algorithms.states import turn_actions, turn_states

Groups = list[list[Trajectory]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The variables of the printed line; all are [tokens] float64, episode by episode."""

    pi: Tensor  # log-probabilities, with gradient
    mu: Tensor
    prox: Tensor  # The policy at the beginning of the batch.
    first: Tensor  # The policy at a sample's first update.
    reference: Tensor
    entropy: Tensor
    lag: Tensor
    episode: Tensor  # int64
    turn: Tensor  # int64, unlike in every turn of the batch
    values: Tensor  # The critic's current values, with gradient.
    old_values: Tensor  # before the step
    end_values: Tensor  # [episode] float64, of the state at the very end


def split_top(text: str, by: str) -> list[str]:
    """Return the parts of a text between separators that no bracket encloses."""
    parts, depth, start = list[str](), 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if depth == 0 and text.startswith(by, at) and at >= start:
            parts.append(text[start:at])
            start = at + len(by)
    return [*parts, text[start:]]


def objective(line: str, tokens: Tokens, groups: Groups) -> Tensor:
    """Evaluate the printed objective."""
    head, _, tail = line.removeprefix("maximise ").partition("; r=")
    laws = dict(part.split("=", 1) for part in split_top("r=" + tail, ", ") if "=" in part)
    t, num = tokens, len(tokens.pi)
    a = torch.from_numpy(advantages(laws["A"], groups, t))
    names = {"A": a, "pi": t.pi.exp(), "mu": t.mu.exp(), "pi_prox": t.prox.exp()}
    names |= {"pi_old": t.prox.exp(), "pi_first": t.first.exp(), "lag": t.lag}
    names["r"] = evaluate(laws["r"], names, t)
    names["w"] = evaluate(laws["w"], names, t).detach() if "w" in laws else torch.ones(num)
    names["v"] = evaluate(laws["v"], names, t).detach() if "v" in laws else torch.ones(num)
    names |= {"H": t.entropy, "log_pi": t.pi, "log_mu": t.mu}
    d = t.pi - t.reference
    names |= {"KL_k1": d, "KL_k2": d**2 / 2, "KL_k3": (-d).exp() - 1 + d}
    mean = re.match(
        r"mean_episodes mean_tokens|mean_tokens|sum_tokens / \(episodes \* (\d+)\)", head
    )
    assert mean is not None, head
    body, less = head[mean.end() :].strip(), torch.zeros(())
    if critic := re.search(r" - ([\d.e-]+)\*VL$", body):
        body, less = body[: critic.start()], float(critic[1]) * value_loss(laws, groups, t)
    elif "minimised by the critic's own network" in tail:
        less = value_loss(laws, groups, t)
    value = evaluate(re.sub(r"\(pi\|[^)]*\)", "", body), names, t)
    num_episodes = int(t.episode.max()) + 1
    if mean[1]:
        return value.sum() / (num_episodes * int(mean[1])) - less
    if mean[0] == "mean_tokens":
        return value.mean() - less
    return torch.stack([value[t.episode == i].mean() for i in range(num_episodes)]).mean() - less


def enclosed(text: str, word: str, form: str) -> str:
    """Return the text with `form` of each log(...) that stands behind a word."""
    while word in text:
        before, _, rest = text.partition(word)
        depth, end = 1, rest.index("(") + 1
        while depth:
            depth += (rest[end] == "(") - (rest[end] == ")")
            end += 1
        text = before + form.format(rest[:end]) + rest[end:]
    return text


def evaluate(text: str, names: dict[str, Tensor], t: Tokens) -> Tensor:
    """Return the value of one formula of the line."""

    def mean(values: Tensor, parts: Tensor) -> Tensor:
        return torch.stack([values[parts == part].mean() for part in parts])

    def floor(x: Tensor, c: float) -> Tensor:
        return torch.where(names["A"] < 0, torch.maximum(x, c * names["A"]), x)

    def low(x: Tensor | float, y: Tensor | float) -> Tensor:
        wide = [torch.as_tensor(each, dtype=torch.float64) for each in (x, y)]
        return torch.minimum(*wide)

    def kept(threshold: float) -> Tensor:
        squares = (t.prox - t.mu) ** 2
        left = squares.tolist()
        while len(left) > 1 and sum(left) / len(left) > threshold:
            left.remove(max(left))
        return (squares <= max(left)).double()

    text = text.replace("^", "**").replace("log pi", "log_pi").replace("log mu", "log_mu")
    text = re.sub(r"\[kept, so that mean_batch \S+<=(\S+?)\]", r"kept(\1)", text)
    text = re.sub(r"\[(min\(.*?\)), at least (\S+?)\*A if A<0\]", r"floor(\1, \2)", text)
    text = re.sub(r"(geomean|prod)_tokens (\([^=]*?\)/mu|[\w/]+)", r"\1(\2)", text)
    text = enclosed(text, "mean_turn_tokens ", "mean({}, t.turn)")
    text = enclosed(text, "mean_tokens ", "mean({}, t.episode)")
    text = re.sub(r"\[not \((.*?) or (.*?)\)\]", r"one(~((\1) | (\2)))", text)
    text = re.sub(r"\[not \((.*?)\)\](?=\*|$)", r"one(~((\1)))", text)
    text = re.sub(r"\[([\d.e-]+)<=(.*?)<=([\d.e-]+)\]", r"one((\1<=(\2)) & ((\2)<=\3))", text)
    text = text.replace(" and ", ") & (").replace("min(", "low(")
    text = text.replace("[", "(").replace("]", ")")
    known = names | {
        "mean": mean,
        "floor": floor,
        "low": low,
        "kept": kept,
        "one": lambda x: x.double(),
        "sg": lambda x: x.detach(),
        "clip": lambda x, a, b: x.clamp(a, b),
        "log": torch.log,
        "exp": lambda x: (x.detach() + t.pi - t.pi.detach()).exp(),  # token form: each its own
        "geomean": lambda x: mean(x.log(), t.episode).exp(),
        "prod": lambda x: torch.stack([x[t.episode == e].prod() for e in t.episode]),
        "t": t,
    }
    return eval(text, {"__builtins__": {}}, known)


def value_loss(laws: dict[str, str], groups: Groups, t: Tokens) -> Tensor:
    """Return the critic's loss over the states that its timesteps begin in."""
    match = re.fullmatch(r"mean_(turn|token)s \[(.*?)(?:; (maximum of this and .*))?\]", laws["VL"])
    assert match is not None, laws["VL"]
    targets = torch.from_numpy(np.concatenate([x[1] for x in critic_of(laws["A"], groups, t)]))
    error = (t.values - targets) ** 2 / 2
    if match[3]:
        clip = number(r"clip\(V-V_old, -([\d.e-]+),", match[3])
        held = t.old_values + (t.values - t.old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - targets) ** 2 / 2)
    first = torch.ones(len(error), dtype=torch.bool)
    first[1:] = (t.turn[1:] != t.turn[:-1]) if match[1] == "turn" else True
    return error[first].mean()


def critic_of(text: str, groups: Groups, t: Tokens) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (A, target) of each episode's sampled tokens, both [tokens] float64, by definition."""
    gamma, trace = number(r"gamma=([\d.e-]+)", text), number(r"lambda=([\d.e-]+)", text)
    cut = r"if cut short then (?:E=(.*) is not paid and )?V_after=(.*), without a last observation "
    told = re.search(rf"pay=(.*), {cut}V_end=(\(V_last - pay_last\)/[\d.e-]+)", text)
    assert told is not None, text
    pay_text, unpaid_text, after_text, behind_text = told.groups()
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for index, e in enumerate(each for group in groups for each in group):
        own = (t.episode == index).numpy()
        values, turns = t.old_values.numpy()[own], e.turn_ids[e.loss_mask]
        step = np.unique(turns, return_inverse=True)[1]
        if "(per token" in text:
            step = np.arange(len(turns))
        num = step[-1] + 1
        pay = np.zeros(num)
        for turn, paid in enumerate(_paid(pay_text, e)):
            before = [at for at in range(len(turns)) if turns[at] <= turn]  # Default: first turns.
            place = before[-1] if before else max(np.flatnonzero(turns == turns[0]))
            pay[step[place]] += paid
        v = np.array([values[step == k][0] for k in range(num)])
        end = 0.0
        if e.end_reason in ("horizon", "truncated", "context_full"):
            share = e.num_invalid_actions / max(e.num_turns, 1)
            known: dict[str, Any] = {"S": e.reward, "S0": e.start_score, "min": min}
            known |= {"R": e.reward - e.start_score, "invalid_frac": share}
            known["clip"] = lambda x, low, high: min(max(x, low), high)
            known["E"] = eval(unpaid_text or "0.0", {"__builtins__": {}}, known)
            pay[-1] -= known["E"]
            known |= {"V_end": float(t.end_values[index]), "V_last": v[-1], "pay_last": pay[-1]}
            if e.loss_mask[-1]:
                known["V_end"] = eval(behind_text, {"__builtins__": {}}, known)
            end = eval(after_text, {"__builtins__": {}}, known)
        following, ratios, bound = np.append(v, end)[1:], np.ones(num), np.ones(num)
        if text.partition("(per ")[0].endswith("V-trace"):
            gap = (t.prox.detach() - t.mu).numpy()[own]
            rho = np.array([np.exp(gap[step == k].sum()) for k in range(num)])
            ratios = np.minimum(rho, number(r"rho<=([\d.e-]+)", text))
            bound = np.minimum(rho, number(r"c<=([\d.e-]+)", text))
        delta = ratios * (pay + gamma * following - v)
        decayed = [
            sum((gamma * trace) ** (k - s) * np.prod(bound[s:k]) * delta[k] for k in range(s, num))
            for s in range(num)
        ]
        targets = v + np.array(decayed)
        a = targets - v
        if "V-trace" in text:
            a = pay + gamma * np.append(targets, end)[1:] - v
        found.append((a[step], targets[step]))
    return found


def advantages(text: str, groups: Groups, t: Tokens) -> np.ndarray:
    """Return A of every sampled token [tokens] float64."""
    episodes = [each for group in groups for each in group]
    if text.startswith(("GAE(per", "V-trace(per")) and "pay=" in text:
        return np.concatenate([x[0] for x in critic_of(text, groups, t)])
    if wrapped := re.fullmatch(r"(whiten_batch|rms_per_env)\((.*)\)", text):
        inner, flat = wrapped[1], advantages(wrapped[2], groups, t)
        envs = np.array([e.env for e in episodes for _ in range(int(e.loss_mask.sum()))])
        if inner == "whiten_batch":
            return (flat - flat.mean()) / (flat.std() + 1e-6) if np.ptp(flat) else 0 * flat
        scale = {env: np.sqrt((flat[envs == env] ** 2).mean()) for env in set(envs)}
        return np.array([x / (scale[e] + 1e-6) if scale[e] else x for x, e in zip(flat, envs)])  # noqa: B905
    of_turns: list[np.ndarray] = []
    for group in groups:
        parts = [_of_group(part, group, groups) for part in _terms(text)]
        of_turns += [sum(each) for each in zip(*parts, strict=True)]
    return np.concatenate(
        [own[e.turn_ids[e.loss_mask]] for e, own in zip(episodes, of_turns, strict=True)]
    )


def _terms(text: str) -> list[str]:
    """Split a sum into its terms, each with its sign."""
    return [
        f"-{minus}" if number else minus
        for plus in split_top(text, " + ")
        for number, minus in enumerate(split_top(plus, " - "))
    ]


def running_mean(
    text: str, groups: Groups, credit_of: Callable[[Trajectory], np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the expected credit from earlier batches, by episode, [entry] float64."""
    memory, prior = number(r"memory=([\d.]+)", text), number(r"prior=([\d.]+)", text)
    seen, now = ([e for g in each for e in g] for each in (history(groups), groups))
    advantages: dict[str, np.ndarray] = {}
    for e in now:
        expected = credit_of(e).astype(np.float64)
        for k in range(len(expected)):
            worth = {id(x): credit_of(x)[k] for x in [*seen, *now] if len(credit_of(x)) > k}
            task = [worth[id(x)] for x in seen if id(x) in worth and _task(x) == _task(e)]
            others = [x for x in now if id(x) in worth and _task(x) == _task(e) and x is not e]
            if task:
                items = [x for x in seen if (x.env, x.item_id) == (e.env, e.item_id)]
                item = [worth[id(x)] for x in items if id(x) in worth]
                weights = memory ** np.arange(len(item))[::-1]
                total = (weights * item).sum() + prior * np.mean(task)
                expected[k] = total / (weights.sum() + prior)
            elif others:
                expected[k] = np.mean([worth[id(x)] for x in others])
        advantages[e.episode_id] = expected
    return advantages


def _task(e: Trajectory) -> tuple[str, str]:
    return e.env, e.item_id.rpartition("-")[0]


def history(groups: Groups) -> Groups:
    """Return the batch before: the first group's items, with other rewards and the same credit."""
    return [[replace(e, reward=1 - e.reward, turn_scores=1 - e.turn_scores) for e in groups[0]]]


def _of_group(term: str, group: list[Trajectory], groups: Groups) -> list[np.ndarray]:
    """Return one term of A for each episode of a group, [num_turns] float64."""
    if "running_mean" in term:
        penalty = re.match(r"-([\d.e-]+)\*\(invalid_turn - ", term)
        credit = term.removeprefix("(").partition(" - running_mean")[0]
        is_per_turn = "running_mean(item, turn;" in term

        def credit_of(e: Trajectory) -> np.ndarray:
            if penalty:
                return -float(penalty[1]) * e.invalid_turns.astype(np.float64)
            worth = _credit(credit, e)
            return worth if is_per_turn else worth[:1]

        expected = running_mean(term, groups, credit_of)
        less = [credit_of(e) - expected[e.episode_id] for e in group]
        return [
            each if is_per_turn else np.full(max(e.num_turns, 1), each[0])
            for e, each in zip(group, less, strict=True)
        ]
    if coefficient := re.fullmatch(r"-([\d.e-]+)\*\((invalid_turn.*)\)", term):
        credit = [float(coefficient[1]) * -e.invalid_turns.astype(np.float64) for e in group]
        return _less(credit, coefficient[2].partition(" - ")[2])
    if weighted := re.fullmatch(r"([\d.e-]+)\*(\(G - .*|gate.*)", term):
        return [float(weighted[1]) * each for each in _by_state(weighted[2], group)]
    if "mean_same_state G" in term:
        return _by_state(term, group)
    match = re.fullmatch(
        r"\((.*?)(?: - (leave_one_out|group_mean|mean_\w+ same_\w+))?\)(/\w+)?", term
    )
    assert match is not None, term
    credit, base, std = match.groups()
    worth = [_credit(credit, e) for e in group]
    per_turn = credit.startswith("sum_later")
    flat = np.concatenate(worth) if per_turn else np.array([x[0] if len(x) else 0 for x in worth])
    less = _less(worth, base or "")
    if std and flat.size:
        less = [each / (flat.std() + 1e-6) for each in less]
    return less


def _credit(text: str, e: Trajectory) -> np.ndarray:
    num = e.num_turns
    if later := re.fullmatch(r"sum_later_turns ([\d.e-]+)\^k\*\(?(.*?)\)?", text):
        return _returns(_paid(later[2], e), float(later[1]))
    match = re.fullmatch(r"R(?:\*([\d.]+)\^\(turns-1\))?(?: - ([\d.]+)\*invalid_frac)?", text)
    assert match is not None, text
    worth = (e.reward - e.start_score) * float(match[1] or 1) ** max(num - 1, 0)
    worth -= float(match[2] or 0) * e.num_invalid_actions / max(num, 1)
    return np.full(max(num, 1), worth)


def _paid(text: str, e: Trajectory) -> np.ndarray:
    pay = np.zeros(e.num_turns)
    if e.num_turns == 0:
        return pay
    if text.startswith("dR"):
        pay += np.diff(e.turn_scores.astype(np.float64), prepend=e.start_score)
    else:
        pay[-1] = e.reward - e.start_score
    if penalty := re.search(r" - ([\d.]+)\*(invalid\w+)", text):
        if penalty[2] == "invalid_turn":
            pay -= float(penalty[1]) * e.invalid_turns
        else:
            pay[-1] -= float(penalty[1]) * e.num_invalid_actions / e.num_turns
    return pay


def _returns(pay: np.ndarray, discount: float) -> np.ndarray:
    return np.array(
        [sum(discount ** (k - t) * pay[k] for k in range(t, len(pay))) for t in range(len(pay))]
    )


def _less(credit: list[np.ndarray], base: str) -> list[np.ndarray]:
    """Return credit less its baseline over members, turn by turn if the line has turns."""
    if not base:
        return credit
    less = []
    for index, each in enumerate(credit):
        others = [x for i, x in enumerate(credit) if i != index and x.size]
        own = [] if base == "leave_one_out" or "mean_others" in base else [each]
        is_held = not base.endswith("_or_0")
        compared = [
            np.mean([x[k] if k < x.size else is_held * x[-1] for x in [*others, *own]])
            for k in range(each.size if others else 0)
        ]
        less.append(each - np.array(compared) if others else 0 * each)
    return less


def number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match is not None, text
    return float(match[1])


def _by_state(text: str, group: list[Trajectory]) -> list[np.ndarray]:
    later = re.search(r"G=sum_later_turns ([\d.e-]+)\^k\*\((.*?)\)", text)
    assert later is not None, text
    discount = float(later[1])
    pays = [_paid(later[2], e) for e in group]
    gains = [_returns(pay, discount) for pay in pays]
    rows = [
        (int(s), int(a), g)
        for e, own in zip(group, gains, strict=True)
        for s, a, g in zip(turn_states(e), turn_actions(e), own, strict=True)
    ]
    values: list[float] = []
    for at, (state, action, gain) in enumerate(rows):
        here = [g for s, _, g in rows if s == state]
        if text.startswith("gate"):
            same = [g for s, a, g in rows if (s, a) == (state, action)]
            of = {
                a: np.mean([g for s, b, g in rows if (s, b) == (state, a)])
                for s, a, _ in rows
                if s == state
            }
            between = np.mean([(of[a] - np.mean(here)) ** 2 for s, a, _ in rows if s == state])
            total = np.var(here)
            prior = float(re.search(r"n/\(n\+([\d.]+)\)", text)[1])
            gate = between / total if np.ptp(here) else 0.0
            values.append(gate * len(same) / (len(same) + prior) * (np.mean(same) - np.mean(here)))
        elif "GAE" in text:
            values.append(float(np.mean(here)))
        else:
            others = [g for i, (s, _, g) in enumerate(rows) if s == state and i != at]
            compared = others if "others_in" in text else here
            value = gain - np.mean(compared) if others else 0.0
            values.append(value / (np.std(here) + 1e-6) if "/std_same_state" in text else value)
    cuts = np.cumsum([len(pay) for pay in pays])[:-1]
    of_members = np.split(np.array(values), cuts)
    if "GAE" not in text:
        return of_members
    trace = number(r"lambda=([\d.e-]+)", text)
    found = []
    for pay, value in zip(pays, of_members, strict=True):
        delta = pay + discount * np.append(value, 0.0)[1:] - value if len(pay) else pay
        found.append(_returns(delta, discount * trace))
    flat = np.concatenate(found)
    if text.startswith("standardize"):
        return [(x - flat.mean()) / (flat.std() + 1e-6) if np.ptp(flat) else 0 * x for x in found]
    return found
