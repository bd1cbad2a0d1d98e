"""Writer of completions/, which has the same content as completions.jsonl in one Parquet file per step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tlt.config import ConfigError
from tlt.config.run import RunConfig
from tlt.files import writing
from tlt.metrics import MetricsError
from tlt.store.completions import record
from tlt.types import Group, PassCounts
from tlt_rl import install_hint

FOLDER = "completions"


def refuse_without_pyarrow(run: RunConfig) -> None:
    """Raise ConfigError if run.completions_format is parquet and pyarrow is not installed."""
    if run.completions_format == "parquet" and not find_spec("pyarrow"):
        raise ConfigError(f"run.completions_format = 'parquet' needs pyarrow: {install_hint('data')}")


class ParquetCompletions:
    """Writer of completions/ with a size limit. If the limit is exceeded, the files of the oldest steps are deleted,
    but never the newest file. When a run is resumed, files of `first_step` and later steps are deleted first."""

    def __init__(self, folder: Path, first_step: int, limit_bytes: int) -> None:
        self.folder, self.limit = folder / FOLDER, limit_bytes
        for path in self.folder.glob("step_*.parquet*"):
            if path.suffix == ".partial" or path >= self._path(first_step):
                path.unlink()

    def write(self, step: int, groups: Iterable[Group]) -> None:
        """Write the responses of a step to a file. Raises MetricsError if it cannot be written."""
        import pyarrow
        from pyarrow import parquet

        rows = [{"step": step} | _flat(record(response)) for group in groups for response in group.responses]
        if not rows:
            return
        path = self._path(step)
        draft = path.with_name(path.name + ".partial")
        with writing(path, MetricsError):
            self.folder.mkdir(exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows, schema=_schema(pyarrow)), draft)
            draft.replace(path)
            self._drop_the_oldest()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.parquet"

    def _drop_the_oldest(self) -> None:
        paths = sorted(self.folder.glob("step_*.parquet"))
        left = sum(path.stat().st_size for path in paths)
        for path in paths[:-1]:
            if left <= self.limit:
                return
            left -= path.stat().st_size
            path.unlink()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a response's record to the types of the schema. A reference answer that is not text becomes JSON."""
    answer = row["answer"]
    if answer is not None and not isinstance(answer, str):
        answer = json.dumps(answer, ensure_ascii=False, default=str)
    texts = {name: _text(row[name]) for name in ("prompt", "response", "extracted_answer", "outcome", "task")}
    return row | texts | {"answer": answer and _text(answer), "scores": list(row["scores"].items())}


def _text(words: str | None) -> str | None:
    """Replace lone surrogates by escapes, because Parquet's text cannot contain them."""
    return words and words.encode("utf-8", "backslashreplace").decode("utf-8")


def _schema(pyarrow: Any) -> Any:
    """Return the Parquet schema. It is the same for all steps, so that their files can be read as one table."""
    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    return pyarrow.schema(
        {
            **dict.fromkeys(("step", "prompt_id", "epoch", "index"), whole),
            **dict.fromkeys(("task", "prompt", "response", "answer", "extracted_answer"), text),
            "reward": real,
            "scores": pyarrow.map_(text, real),
            "outcome": text,
            "advantage": real,
            "length": whole,
            "finish_reason": text,
            "replies": pyarrow.list_(text),
            "decoded": pyarrow.struct([(field.name, whole) for field in fields(PassCounts)]),
            "proposed": text,
        }
    )
