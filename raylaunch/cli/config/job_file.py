"""Job files: reading them, their YAML 1.2 with its limits, and a dump that loads as the same job.

Also here: the check that the script exists, the other file that a command line names.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from raylaunch.cli.args import suggestions
from raylaunch.cli.args.diagnostics import COMMAND_LINE, Finding, SourceSpan
from raylaunch.cluster.session import discovery
from raylaunch.core.job.job import Job
from raylaunch.errors import ConfigError

MAX_BYTES = 256 * 1024
"""The size of a job file. PyYAML reads about 100 kB in a second."""
MAX_DEPTH = 64
"""How many sections and lists may be inside each other."""
_MAX_CHARACTERS = 40
"""Characters of a number. Python refuses to print integers of more than 4,300 digits."""


def read_job_file(name: str) -> str:
    """Return the text of a job file. Raises ConfigError if it cannot be read.

    A JSON file may be indented with tabs, which YAML forbids: they become spaces.
    """
    path = Path(name)
    data, hint = b"", ""
    try:
        # Without O_NONBLOCK, the open of a named pipe waits for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"error: `{name}` is not a regular file")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"error: `{name}` has more than {MAX_BYTES // 1024} KiB, the limit of a job file")
        text = data.decode("utf-8-sig")
        return text.replace("\t", " ") if path.suffix == ".json" else text
    except (FileNotFoundError, NotADirectoryError):
        message, hint = f"`{name}` does not exist", _similar_file(path, path, "*.y*ml")
    except IsADirectoryError:
        message = f"`{name}` is a folder"
    except UnicodeDecodeError as error:
        lines = data[: error.start].split(b"\n")
        hint = "it looks like UTF-16; save it as UTF-8" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
        message = f"`{name}` is not UTF-8\n --> {name}:{len(lines)}:{len(lines[-1]) + 1}"
    except OSError as error:
        message = f"`{name}` cannot be read: {str(error.strerror or error).lower()}"
    except ValueError:
        message = f"{name!r} cannot name a file"
    raise ConfigError(f"error: {message}" + f"\n  = {hint}" * bool(hint))


def command_findings(job: Job, span: SourceSpan) -> Iterator[Finding]:
    """Yield whether a program's name has its arguments in it, unless there is a program of this name."""
    command = job.entrypoint.command or ""
    words = suggestions.split(command)
    if len(words) > 1 and shutil.which(command) is None and shutil.which(words[0]) is not None:
        hint = suggestions.separated(words, in_file=span.source != COMMAND_LINE)
        yield Finding(message="`command` is one program, without its arguments", span=span, hint=hint)


def script_beside(job: Job, name: str) -> str:
    """Return the path of the script in the folder of the job file with this name; "": it is not there alone.

    A script is looked for in the working folder first, as by torchrun.
    """
    script = job.entrypoint.script
    if not script or job.ray.working_dir or Path(script).is_absolute():
        return ""
    path = Path(name).parent / script
    try:
        return str(path) if path.exists() and not Path(script).exists() else ""
    except OSError:
        return ""


def script_findings(job: Job, span: SourceSpan, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the script's file, before anything is started.

    A path that only other machines can check is not looked at: an absolute path on a cluster, or a working folder
    that Ray downloads.
    """
    script = job.entrypoint.script
    if script is None:
        return
    if Path(script).is_absolute() and not _is_run_here(job, environ):
        return
    try:
        yield from _file_findings(Path(job.ray.working_dir or "."), script, job.entrypoint.args, span)
    except OSError as error:
        yield Finding(message=f"`{script}` cannot be used: {str(error.strerror or error).lower()}", span=span)


def _file_findings(folder: Path, script: str, args: Sequence[object], span: SourceSpan) -> Iterator[Finding]:
    if not folder.is_dir():
        return  # an archive or a URL, which Ray unpacks on the nodes
    path = folder / script
    if not path.exists():
        hint = suggestions.for_script(script, args, in_file=span.source != COMMAND_LINE)
        is_foreign = suggestions.is_foreign(script)
        what = "is no command, and there is no script of this name" if is_foreign else "does not exist"
        yield Finding(message=f"`{script}` {what}", span=span, hint=hint or _similar_file(path, Path(script)))
    elif path.is_dir() and not (path / "__main__.py").is_file():
        message = f"`{script}` is a folder without a `__main__.py`"
        yield Finding(message=message, span=span, hint=_script_inside(path, script))
    elif not os.access(path, os.R_OK):
        yield Finding(message=f"`{script}` cannot be read: permission denied", span=span, hint=f"chmod +r {script}")
    elif path.is_file() and zipfile.is_zipfile(path) and "__main__.py" not in _names(path):
        yield Finding(message=f"`{script}` is an archive without a `__main__.py`", span=span)


def _is_run_here(job: Job, environ: Mapping[str, str]) -> bool:
    """Return whether the job runs on this machine only."""
    with_local_ray = job.ray.address == "auto" and environ.get("RAY_ADDRESS") == "local"
    return job.ray.address == "local" or with_local_ray or discovery.is_alone(job.ray, environ)


def _names(path: Path) -> list[str]:
    """Return the names of the files in an archive. Raises OSError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile as error:
        raise OSError(str(error)) from error


def _similar_file(path: Path, name: Path, pattern: str = "*") -> str:
    """Return a hint at the file that was probably meant, "" for none. `name` is the missing path as it was given."""
    if not path.parent.is_dir():
        return f"there is no folder `{name.parent}`"
    close = get_close_matches(path.name, [file.name for file in path.parent.glob(pattern)], n=1, cutoff=0.6)
    return f"did you mean `{name.with_name(close[0])}`?" if close else ""


def _script_inside(path: Path, script: str) -> str:
    scripts = sorted(file.name for file in path.glob("*.py"))
    return f"did you mean `{Path(script) / scripts[0]}`?" if len(scripts) == 1 else "name a file in it"


_Event = yaml.events.Event


class Yaml12Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does, and refuses what PyYAML reads in a surprising way.

    PyYAML raises RecursionError for text that is nested too deep, and silently takes the last of duplicate keys.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def __init__(self, text: str) -> None:
        """Take the text of a file. Raises yaml.reader.ReaderError for a character that YAML does not allow."""
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node. Raises ConstructorError if it is nested too deep, or stands inside itself."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refusal(f"more than {MAX_DEPTH} sections and lists are inside each other", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent) and node is not None and node.end_mark is None:  # it is not complete
            raise _refusal("a recursive alias", event)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Return the next scalar. Pairs of escapes for one character, as JSON has them, become that character."""
        node = super().compose_scalar_node(anchor)
        with contextlib.suppress(UnicodeError):
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        try:
            node.value.encode("utf-8", "surrogateescape")  # this is how Python keeps bytes that are not UTF-8
        except UnicodeError:
            raise _refusal("an escape is half a character", node) from None
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the next section. Raises ConstructorError for a key that is no text, or is given twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key must be text", key)
            if key.value in lines:
                raise _refusal(f"`{key.value}` is given twice, first in line {lines[key.value]}", key)
            lines[key.value] = key.start_mark.line + 1
        self.flatten_mapping(node)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the text of a scalar. Raises ValueError if it does not fit its tag."""
        if isinstance(node, yaml.ScalarNode) and (kind := node.tag.rpartition(":")[2]) in _PATTERNS:
            if len(node.value) > _MAX_CHARACTERS:
                raise _refusal(f"a number of more than {_MAX_CHARACTERS} characters", node)
            if not re.match(_PATTERNS[kind], node.value) and not (kind == "float" and node.value.isdecimal()):
                raise ValueError(node.value)
        return super().construct_scalar(node)


def _refusal(problem: str, at: yaml.Node | _Event) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)  # type: ignore[arg-type]


class Yaml12Dumper(yaml.SafeDumper):
    """Quotes text that `Yaml12Loader` or a YAML 1.1 reader would not read as text."""


# In PyYAML's YAML 1.1, `1:4` is sixty-four, `no` is false, `010` is eight and `3e-4` is text.
_DECIMAL = r"(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
_PATTERNS = {
    "null": r"^(?:~|null|Null|NULL|)$",
    "bool": r"^(?:true|True|TRUE|false|False|FALSE)$",
    "int": r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$",
    "float": rf"^(?:[-+]?(?:{_DECIMAL}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$",
    "merge": r"^<<$",
}
"""What a scalar must look like, by the kind that its tag names. A file may give the tag itself, as in `!!int 3`."""
_FIRST = {
    "null": ["~", "n", "N", ""],
    "bool": list("tTfF"),
    "int": list("-+0123456789"),
    "float": list("-+.0123456789"),
    "merge": ["<"],
}
"""The first characters of such scalars."""
for _class in (Yaml12Loader, Yaml12Dumper):
    for _kind, _pattern in _PATTERNS.items():
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _FIRST[_kind])


def dump(job: Job) -> str:
    """Return all settings of the job as YAML, which loads as the same job."""
    return str(yaml.dump(escaped(asdict(job)), Dumper=Yaml12Dumper, sort_keys=False, allow_unicode=True, width=10_000))


def escaped(value: Any) -> Any:
    """Escape `${` in all text of a value, so that OmegaConf does not read it as a reference."""
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
