"""Text of the credit of an episode or a turn, and of the baseline."""

from common.config.algorithm import Advantage, AlgorithmSection, Baseline, CreditLevel, StateCredit


def state_text(cfg: AlgorithmSection, kind: Baseline) -> str:
    """Return the formula of the state credit of a turn; G is the turn's return."""
    paid = paid_text(cfg)
    scaled = cfg.normalize_std and cfg.advantage is Advantage.GRPO
    returns = f"G=sum_later_turns {cfg.state_discount:g}^k*({paid})"
    if cfg.state_credit is StateCredit.GAGPO:
        gae = f"GAE(per turn, gamma={cfg.state_discount:g}, lambda={cfg.state_lambda:g}"
        text = f"{gae}, V=mean_same_state G, {returns})"
        return f"standardize_group_turns({text})" if scaled else text
    if cfg.state_credit is StateCredit.ECPO:
        return (
            f"gate*n/(n+{cfg.state_prior:g})*(mean_same_state_and_action G - mean_same_state G; "
            f"n visits, gate=var_between_actions/var, {returns})"
        )
    which = "others_in" if kind is Baseline.LEAVE_ONE_OUT else "all_in"
    return f"(G - mean_{which}_same_state G; {returns})" + ("/std_same_state" if scaled else "")


def running_text(cfg: AlgorithmSection) -> str:
    """Return the formula of A for advantage=running; each seat and opponent has its own means."""
    means = f"memory={cfg.running_memory:g}, prior={cfg.running_prior:g}"
    is_per_turn = cfg.reward_level is CreditLevel.TURN
    of = "item, turn" if is_per_turn else "item"
    text = f"({credit_text(cfg)} - running_mean({of}; {means}))"
    is_on_turns = cfg.invalid_action_level is CreditLevel.TURN
    if cfg.invalid_action_penalty and is_on_turns and not is_per_turn:
        penalty = f"{cfg.invalid_action_penalty:g}"
        text += f" - {penalty}*(invalid_turn - running_mean(item, turn; {means}))"
    return f"A=rms_per_env({text})" if cfg.normalize_per_env else f"A={text}"


def credit_text(cfg: AlgorithmSection) -> str:
    """Return the formula of the credit of an episode, or of the return after a turn."""
    if cfg.reward_level is CreditLevel.TURN:
        paid = paid_text(cfg)
        return f"sum_later_turns {cfg.turn_discount:g}^k*{f'({paid})' if ' ' in paid else paid}"
    discount = f"*{cfg.turn_discount:g}^(turns-1)" if cfg.turn_discount != 1 else ""
    is_on_turns = cfg.invalid_action_level is CreditLevel.TURN
    penalty = 0.0 if is_on_turns else cfg.invalid_action_penalty
    return f"R{discount}" + (f" - {penalty:g}*invalid_frac" if penalty else "")


def paid_text(cfg: AlgorithmSection) -> str:
    """Return the formula of a turn's reward; [last] is 1 in the last turn."""
    paid = "dR" if cfg.reward_level is CreditLevel.TURN else "R[last]"
    if cfg.invalid_action_penalty:
        is_on_turns = cfg.invalid_action_level is CreditLevel.TURN
        of = "invalid_turn" if is_on_turns else "invalid_frac[last]"
        paid += f" - {cfg.invalid_action_penalty:g}*{of}"
    return paid


def cut_text(cfg: AlgorithmSection, discount: float) -> str:
    """Return the reward and the value at the end of an episode that was cut short.

    S is the last score, S0 the score before the first turn, R = S - S0. E is the reward at the end
    of the task. V_last and pay_last belong to the last timestep.
    """
    is_level = cfg.reward_level is CreditLevel.EPISODE
    parts = ["R"] if is_level else []
    if cfg.invalid_action_penalty and cfg.invalid_action_level is CreditLevel.EPISODE:
        parts.append(f"{-cfg.invalid_action_penalty:g}*invalid_frac")
    most = "1 - S + E" if parts else "1 - S"
    bound = f"min(V_end, {most})"
    if is_level and discount == 1.0:
        bound = f"clip(V_end, E + min(V_end, 0) if S0 == 0 else V_end, {most})"
    end = f"E={' + '.join(parts)} is not paid and " if parts else ""
    behind = f"V_end=(V_last - pay_last)/{discount:g}"
    return f"if cut short then {end}V_after={bound}, without a last observation {behind}"
