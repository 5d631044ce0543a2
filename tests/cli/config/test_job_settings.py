"""The keyword arguments of the Python API are the settings of a job, with their types."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from raylaunch.cli.config import job_settings
from raylaunch.core.job import job
from raylaunch.core.job.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.job.validation import problems

PAIRS = {
    "a job": (job_settings.JobSettings, Job),
    "a node rule": (job_settings.NodeRuleSettings, NodeRule),
    "ray": (job_settings.RaySettings, RayOptions),
}


def plain(hint: Any) -> set[Any]:
    """Return the options of a type: those of the schema, which the Python API names in other words."""
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*map(plain, get_args(hint)))
    if get_origin(hint) is Literal:
        return {str}
    if hint == Sequence[str]:
        return {list[str], str}  # a text is a sequence of texts too
    if get_origin(hint) is Mapping:
        values = plain(get_args(hint)[1])
        return {dict[str, NodeRule if NodeRule in values else str]}
    sections = {job_settings.NodeRuleSettings: NodeRule, job_settings.RaySettings: RayOptions}
    return {sections.get(hint, hint)}


@pytest.mark.parametrize("name", PAIRS)
def test_each_setting_has_its_type(name):
    """A setting that is added to the schema must be added here too, or the Python API could not give it."""
    settings, schema = PAIRS[name]
    found, wanted = get_type_hints(settings), get_type_hints(schema)
    assert wanted.pop("entrypoint", Entrypoint) is Entrypoint  # the arguments of `launch` are it
    assert set(found) == set(wanted)
    for key, hint in wanted.items():
        options = plain(hint)
        assert plain(found[key]) - {str} == options - {str} - ({int} if float in options else set()), key
        assert (str in plain(found[key])) == (str in options or list[str] in options), key


def words(hint: Any) -> set[str]:
    """Return the words that a setting may be."""
    if get_origin(hint) is Literal:
        return {*get_args(hint)}
    return set().union(*map(words, get_args(hint))) if get_args(hint) else set()


LITERALS = {key: found for key, hint in get_type_hints(job_settings.JobSettings).items() if (found := words(hint))}


@pytest.mark.parametrize("key", LITERALS)
def test_each_word_is_one_that_the_setting_can_be(key):
    """And no other one can: the job is refused."""
    entry = Entrypoint(script="train.py")
    for word in LITERALS[key]:
        assert [found for found in problems(Job(entrypoint=entry, **{key: word})) if found.key == key] == []
    assert [found for found in problems(Job(entrypoint=entry, **{key: "no-such-word"})) if found.key == key] != []


def test_the_words_are_those_of_the_schema():
    """Where it lists them."""
    assert LITERALS["placement"] == {*job.PLACEMENTS}
    assert LITERALS["log_layout"] == {*job.LOG_LAYOUTS}
    assert LITERALS["numa_binding"] == {*job.NUMA_BINDINGS}
    assert LITERALS["event_log_handler"] == {*job.EVENT_LOG_HANDLERS}
    assert LITERALS["hang_timeout"] == {*job.HANG_WORDS}
    assert LITERALS["start_method"] == {*job.StartMethod}
