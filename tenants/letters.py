"""Pure: what mails say, in English and Chinese."""

from dataclasses import dataclass

from core.mail import Letter
from tenants.types import Person

CHINESE = "zh-CN"


@dataclass(frozen=True, slots=True)
class Post:
    """What an installation's mails with links are made with."""

    base_url: str
    pepper: bytes
    sealing_key: bytes


def reset(person: Person, base_url: str, token: str) -> Letter:
    """The link to a new password. What follows ``#`` stays in the browser: no server's log has it."""
    link = f"{base_url}/reset#{token}"
    if person.language == CHINESE:
        return Letter(
            person.email,
            "重设您的 Tidegate 密码",
            f"有人请求为此邮箱重设密码。如果是您本人，请在一小时内打开：\n\n{link}\n\n"
            f"{_by_api_zh(base_url, 'password-reset/confirm')} ，并附上新的 `password`。\n\n"
            "如果不是您本人，请忽略此邮件，密码不会改变。\n",
        )
    return Letter(
        person.email,
        "Set a new Tidegate password",
        f"Somebody asked for a new password for this address. If it was you, open this within an hour:\n\n{link}\n\n"
        f"{_by_api(base_url, 'password-reset/confirm')} with the new `password`.\n\n"
        "If it was not you, there is nothing to do; your password stays as it is.\n",
    )


def password_changed(person: Person) -> Letter:
    if person.language == CHINESE:
        return Letter(
            person.email,
            "您的 Tidegate 密码已更改",
            "您的密码刚刚被更改，其他登录会话已全部结束。如果不是您本人操作，请立即重设密码并联系管理员。\n",
        )
    return Letter(
        person.email,
        "Your Tidegate password was changed",
        "Your password was changed just now, and your other sessions ended. If it was not you, set a new password at "
        "once and tell your administrator.\n",
    )


def invite(email: str, *, inviter: str, place: str, role: str, base_url: str, token: str) -> Letter:
    """The link into an organisation, or among the operators. The invited person's language is not known yet.

    `place` may be anything that a tenant calls itself; it is quoted, and links are only ours.
    """
    link = f"{base_url}/invite#{token}"
    return Letter(
        email,
        "You are invited to Tidegate",
        f'{inviter} invites you to "{place}" on Tidegate, as {role}. Open this within seven days:\n\n{link}\n\n'
        f"{_by_api(base_url, 'invites/accept')} with a `name` and a `password`; "
        f"who has an account signs in and sends it to {base_url}/api/v1/me/invites/accept.\n\n"
        "If you do not know what this is about, there is nothing to do.\n",
    )


def _by_api(base_url: str, path: str) -> str:
    return f"Or send the part after # as `token` to POST {base_url}/api/v1/auth/{path}"


def _by_api_zh(base_url: str, path: str) -> str:
    return f"也可以将 # 之后的部分作为 `token` 发送到 POST {base_url}/api/v1/auth/{path}"
