"""Values that refer to others with `${...}`, and what to say when one leads nowhere."""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from raylaunch.cli.settings import near_miss, shown

_BACKSLASHES_BEFORE_REFERENCE = re.compile(r"(\\*)\$\{")


class DeadReferenceError(ValueError):
    """A `${...}` that cannot be replaced by a value."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def refers(text: str) -> bool:
    """Whether OmegaConf has something to replace in it."""
    return "${" in text


def is_complete(text: str) -> bool:
    """Whether every `${` in a text is closed and has a meaning."""
    try:
        OmegaConf.create([text])
    except GrammarParseError:
        return False
    return True


def resolved(config: DictConfig | ListConfig, name: Any, text: str) -> Any:
    """The value that the text at a name of the config stands for; raises DeadReferenceError."""
    if not is_complete(text):
        message = f"`{shown(text)}` is not a complete `${{...}}`"
        raise DeadReferenceError(message, hint=r"write `\${` for a plain `${`")
    try:
        value = config[name]
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _explained(error, text) from None
    return value


def escaped(text: str) -> str:
    """The text that `resolved` turns back into this one."""
    return _BACKSLASHES_BEFORE_REFERENCE.sub(r"\1\1\\${", text)


def _explained(error: OmegaConfBaseException, text: str) -> DeadReferenceError:
    sentence, text = str(error).partition("\n")[0], shown(text)
    if match := re.search(r"Environment variable '(.*)' not found", sentence):
        name = match[1]
        hint = f"set it, or give a default: `${{oc.env:{name},value}}`"
        return DeadReferenceError(f"the environment variable `{name}` is not set", hint)
    if match := re.search(r"Interpolation key '([^']*)'", sentence):
        return DeadReferenceError(f"`{text}` refers to `{match[1]}`, which does not exist", _meant(match[1]))
    if match := re.search(r"Unsupported interpolation type (\S+)", sentence):
        hint = "environment variables are `${oc.env:NAME}`"
        return DeadReferenceError(f"`{text}` asks for `{match[1]}`, which does not exist", hint)
    if "MissingMandatoryValue" in sentence:
        return DeadReferenceError(f"`{text}` refers to a value that must still be given", "")
    if re.search(r"Recurs|parent node", sentence):
        return DeadReferenceError(f"`{text}` refers to itself", "")
    reason = sentence.rpartition("raised while resolving interpolation: ")[2]
    return DeadReferenceError(f"`{text}` has no value: {reason}", "")


def _meant(key: str) -> str:
    if key in os.environ:
        return f"did you mean `${{oc.env:{key}}}`?"
    return f"did you mean `${{{meant}}}`?" if (meant := near_miss(key)) else ""
