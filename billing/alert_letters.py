"""Pure: what mails about budgets and credit say, in English and Chinese."""

from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo

import msgspec

from billing.credit_alerts import AlertKind, CreditAlert
from billing.crossings import Crossing
from core.mail import Letter
from core.money import format_pico
from tenants.letters import CHINESE
from tenants.types import Person

_LEVELS = {
    "tenant": ("the organisation", "组织"),
    "project": ("the project", "项目"),
    "key": ("the API key", "API 密钥"),
}
_METRICS = {
    "spend_per_day": ("spend per day", "每日消费"),
    "spend_per_month": ("spend per month", "每月消费"),
    "spend_total": ("spend in total", "总消费"),
}
_THEN = {
    "hard": ("Requests that do not fit into it are refused.", "超出预算的请求将被拒绝。"),
    "soft": ("Requests are still served.", "请求仍会继续处理。"),
}


class Place(msgspec.Struct, frozen=True):
    """Whose money it is, as people call it."""

    tenant: str
    currency: str
    zone: ZoneInfo


def amount(pico: int, currency: str) -> str:
    """Return an amount with two decimals or as many as it needs, e.g. ``8.00 USD``."""
    whole, _, fraction = format_pico(pico).partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')} {currency}"


def _day(at: datetime, zone: ZoneInfo) -> str:
    return at.astimezone(zone).strftime("%Y-%m-%d %H:%M")


def _line(crossing: Crossing, name: str, place: Place, chinese: int) -> str:
    spent, limit = amount(crossing.spent_pico, place.currency), amount(crossing.limit_pico, place.currency)
    level, metric = _LEVELS[crossing.level][chinese], _METRICS[crossing.metric][chinese]
    then = _THEN[crossing.mode][chinese]
    start, until = crossing.window
    since = ""
    if start is not None and until is not None:
        first, last = _day(start, place.zone), _day(until, place.zone)
        since = f"（{first} 至 {last}，{place.zone.key}）" if chinese else f", {first} to {last} {place.zone.key}"
    if chinese:
        model = f"，模型 {crossing.model}" if crossing.model else ""
        return f"- {level}“{name}”{model}：{metric}预算 {limit} 已使用 {spent}（{crossing.threshold}%）{since}。{then}"
    model = f" for the model {crossing.model}" if crossing.model else ""
    return f'- {crossing.threshold} %: {level} "{name}" used {spent} of {limit}, {metric}{model}{since}. {then}'


def crossed(person: Person, found: Sequence[tuple[Crossing, str]], place: Place) -> Letter:
    """The thresholds that were reached, each with the name of whose budget it is."""
    chinese = int(person.language == CHINESE)
    lines = "\n".join(_line(crossing, name, place, chinese) for crossing, name in found)
    highest = max(crossing.threshold for crossing, _ in found)
    if chinese:
        return Letter(person.email, f"预算已使用 {highest}%", f"“{place.tenant}”的预算达到提醒阈值：\n\n{lines}\n")
    return Letter(
        person.email,
        f"{highest} % of a budget is used",
        f'Budgets of "{place.tenant}" reached a threshold:\n\n{lines}\n\n'
        "Each threshold is told once a period. Thresholds are set with the alert settings of the organisation.\n",
    )


def credit(person: Person, alert: CreditAlert, place: Place) -> Letter:
    """A balance that is low, or will be soon, or a postpaid limit that is used up."""
    left, at = amount(alert.available_pico, place.currency), amount(alert.threshold_pico, place.currency)
    english = {
        AlertKind.LOW_BALANCE: ("Credit is low", f"{left} are left; you asked to be told at {at}."),
        AlertKind.DAYS_LEFT: (
            f"Credit lasts for {alert.days} more days",
            f"{left} are left, which at the rate of the last seven days lasts for {alert.days} days.",
        ),
        AlertKind.LIMIT_80: ("80 % of the credit limit is used", f"{left} of the limit are left."),
        AlertKind.LIMIT_100: ("The credit limit is used up", f"{left} of the limit are left: requests are refused."),
    }
    chinese = {
        AlertKind.LOW_BALANCE: ("余额不足", f"剩余 {left}，您设定的提醒金额为 {at}。"),
        AlertKind.DAYS_LEFT: (
            f"余额还可使用 {alert.days} 天",
            f"剩余 {left}，按最近七天的用量还可使用 {alert.days} 天。",
        ),
        AlertKind.LIMIT_80: ("信用额度已使用 80%", f"额度剩余 {left}。"),
        AlertKind.LIMIT_100: ("信用额度已用完", f"额度剩余 {left}，请求将被拒绝。"),
    }
    if person.language == CHINESE:
        subject, text = chinese[alert.kind]
        return Letter(person.email, subject, f"“{place.tenant}”：{text}\n\n余额回升之前不会再次提醒。\n")
    subject, text = english[alert.kind]
    return Letter(
        person.email,
        subject,
        f'"{place.tenant}": {text}\n\nYou are not told again before the credit has risen above that.\n',
    )
