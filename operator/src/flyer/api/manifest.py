"""Manifests: YAML in, FlyerJobs out, or one error that names everything that is wrong.

Each problem names file, line, field, value, why, and what to do instead. A manifest with one
problem yields no job at all.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from flyer.api.flyerjob import FlyerJob
from flyer.api.names import API_VERSION, KIND_JOB
from flyer.api.places import field_of, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic_core import ErrorDetails

# A manifest is written by a person; more is a wrong file (or a billion laughs).
BYTES_MAX = 1 << 20
_VALUE_CHARS_MAX = 60
# Fields that had another name in earlier versions, with their present one.
RENAMED_FIELDS = {
    "spec.group": "spec.nodeClass and spec.zone",
    "spec.maxRuntime": "spec.activeDeadline",
    "spec.watchdog": "spec.progressDeadline",
    "spec.preemption.grace": "spec.preemption.checkpointGracePeriod",
    "spec.preemption.maxGrace": "spec.preemption.maxCheckpointGracePeriod",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a manifest."""

    file: str
    line: int | None
    field: str
    value: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        text = ": ".join(part for part in (place, self.field, self.value) if part)
        text = f"{text} {self.why}" if self.value else f"{text}: {self.why}"
        return f"{text}: {self.remedy}" if self.remedy else text


class ManifestError(ValueError):
    """A manifest that cannot be used; `problems` has one entry for each reason."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def load_manifest(source: Path | str, *, name: str | None = None) -> list[FlyerJob]:
    """Read the FlyerJobs of a file (a Path) or of YAML text (a str, called `name` in errors).

    Raises ManifestError for anything that is not a FlyerJob, and OSError when the file cannot be
    read.
    """
    if isinstance(source, Path):
        file = name or str(source)
        data = source.read_bytes()
        if len(data) > BYTES_MAX:
            raise _error(file, f"has {len(data)} bytes: a manifest has at most {BYTES_MAX}")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise _error(
                file, f"is not UTF-8 text (byte {error.start}): save it as UTF-8"
            ) from None
    else:
        file, text = name or "<manifest>", source
    documents = [document for document in _parse(file, text) if document is not None]
    if not documents:
        raise _error(file, f"holds no object: write a {KIND_JOB} of {API_VERSION}")
    jobs: list[FlyerJob] = []
    problems: list[Problem] = []
    for document in documents:
        try:
            jobs.append(_build(file, document))
        except ManifestError as error:
            problems.extend(error.problems)
    problems.extend(_duplicates(file, jobs))
    if problems:
        raise ManifestError(tuple(problems))
    return jobs


def _error(file: str, why: str, line: int | None = None, remedy: str = "") -> ManifestError:
    return ManifestError((Problem(file, line, "", "", why, remedy),))


def _parse(file: str, text: str) -> list[Any]:
    parser = YAML(typ="rt", pure=True)
    try:
        return list(parser.load_all(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        # Only the first line: the rest is advice about the parser's own settings.
        why = str(error.problem or error.context or "cannot be parsed").strip().splitlines()[0]
        raise _error(file, f"is not YAML: {why}", line) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise _error(file, f"is not YAML: {str(error).splitlines()[0]}") from None


def _build(file: str, document: Any) -> FlyerJob:
    if not isinstance(document, CommentedMap):
        raise _error(
            file, f"{_show(document)} is not an object: write apiVersion, kind, metadata, spec"
        )
    absent = [name for name in ("apiVersion", "kind") if name not in document]
    if absent:
        raise ManifestError(
            tuple(
                Problem(
                    file, document.lc.line + 1, name, "", "is missing", f"write {name}: {value}"
                )
                for name, value in (("apiVersion", API_VERSION), ("kind", KIND_JOB))
                if name in absent
            )
        )
    try:
        return FlyerJob.model_validate(_plain(document), by_alias=True, by_name=False)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        raise ManifestError(tuple(_problem(file, document, detail) for detail in details)) from None


def _plain(value: Any) -> Any:
    """The value converted to built-in types, which strict models accept."""
    if isinstance(value, CommentedMap):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, CommentedSeq):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _problem(file: str, document: CommentedMap, detail: ErrorDetails) -> Problem:
    path = tuple(part for part in detail["loc"] if part != "function-after")
    line = line_of(document, path)
    field = field_of(path)
    why, remedy = _explain(detail, path)
    missing = detail["type"] == "missing"
    composite = isinstance(detail["input"], dict | list | BaseModel)
    value = (
        ""
        if missing or (composite and detail["type"] != "extra_forbidden")
        else _show(detail["input"])
    )
    if detail["type"] == "extra_forbidden":
        value = ""
    return Problem(file, line, field, value, why, remedy)


def _explain(detail: ErrorDetails, path: tuple[str | int, ...]) -> tuple[str, str]:
    """The reason and the remedy, reworded where pydantic's text names Python types."""
    context: Mapping[str, Any] = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "extra_forbidden":
        return "is not a field of FlyerJob", _closest_field(path)
    if kind == "missing":
        return "is missing", "add it"
    if kind == "greater_than_equal":
        return "is too small", f"give {context['ge']} or more"
    if kind == "less_than_equal":
        return "is too large", f"give {context['le']} or less"
    if kind in _WRONG_TYPE:
        return _WRONG_TYPE[kind]
    if kind in ("enum", "literal_error"):
        return "is not a valid value", _closest_value(detail["input"], str(context["expected"]))
    if kind == "string_pattern_mismatch":
        return "is invalid", f"it must match {context['pattern']}"
    if kind == "value_error":
        return str(context["error"]), ""
    return detail["msg"], ""


_WRONG_TYPE = {
    "int_type": ("is not an integer", "write a number without quotes"),
    "int_from_float": ("is not an integer", "write an integer"),
    "bool_type": ("is neither true nor false", "write true or false without quotes"),
    "string_type": ("is not a string", 'put it in quotes, such as "1"'),
    "list_type": ("is not a list", "write each entry on its own line after a dash"),
    "dict_type": ("is not a map", "write name: value pairs below it"),
    "model_type": ("is not a map", "write name: value pairs below it"),
    "too_short": ("is empty", "give at least one entry"),
    "string_too_short": ("is empty", "give a text"),
}


def _closest_field(path: tuple[str | int, ...]) -> str:
    if (renamed := RENAMED_FIELDS.get(field_of(path))) is not None:
        return f"it was renamed, write {renamed}"
    names = _field_names(path[:-1])
    close = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.6)
    # Names that differ only in case or separators are matched first.
    folded = {name.lower(): name for name in names}
    same = folded.get(str(path[-1]).lower().replace("_", "").replace("-", ""))
    if same or close:
        return f"did you mean {same or close[0]}?"
    return f"remove it; the fields here are {', '.join(names)}"


def _field_names(path: tuple[str | int, ...]) -> list[str]:
    model: Any = FlyerJob
    for part in path:
        if isinstance(part, int):
            continue
        by_alias = {field.alias or name: field for name, field in model.model_fields.items()}
        if part not in by_alias:
            return []
        model = _model_of(by_alias[part].annotation)
        if model is None:
            return []
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (model := _model_of(inner)) is not None:
            return model
    return None


def _closest_value(value: object, expected: str) -> str:
    names = [word.strip().strip("'") for word in expected.replace(" or ", ", ").split(",")]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close and len(names) > 1 else ""
    return f"{hint}give {'one of ' if len(names) > 1 else ''}{', '.join(names)}"


def _show(value: object) -> str:
    if value is None:
        return "nothing"
    text = (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}…"


def _duplicates(file: str, jobs: list[FlyerJob]) -> Iterator[Problem]:
    keys: set[str] = set()
    for job in jobs:
        if job.key in keys:
            yield Problem(
                file, None, "metadata.name", job.key, "appears twice", "give each job its own name"
            )
        keys.add(job.key)


__all__ = ["BYTES_MAX", "RENAMED_FIELDS", "ManifestError", "Problem", "load_manifest"]
